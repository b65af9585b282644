"""Client operations on agent sessions: create, get, finish, cancel and stream."""

import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import TypedDict, Unpack
from urllib.parse import quote

from pydantic import ValidationError

from coppice.errors import BadAnswer, CoppiceError, ReplicaGone, StreamBroken
from coppice.operations.record_stream import NDJSON
from coppice.session_results import AgentSession, SessionGroup, SessionResult, session_result_of
from coppice.transport.messages import HttpRequest, json_request
from coppice.transport.retry import RequestSender
from coppice.wire.columns.kv_version_spans import KeepKv
from coppice.wire.rollouts import WeightsConstraint
from coppice.wire.sampling import Sampling
from coppice.wire.sessions import (
    SESSIONS_RECORD,
    CacheScope,
    History,
    OverridableField,
    SessionAnswer,
    SessionFinishRequest,
    SessionRecord,
    SessionsAnswer,
    SessionsEndRecord,
    SessionsFinish,
    SessionsRecord,
    SessionsRequest,
    SessionStatus,
)


class SessionOptions(TypedDict, total=False):
    """Keyword arguments of `sessions.create`.

    Attributes:
        group: label of the group, by default a random one.
        adapter: name of a loaded LoRA adapter, or `name@version`.
        sampling: sampling parameters of all calls.
        overrides: names of sampling parameters that the agent may set (max_tokens and stop). Others
            that it sends are replaced.
        weights: exact or minimum weights version.
        keep_kv: reads KV of the session that older weights computed, if the activation kept it.
        ttl_seconds: time after the last call after which the session expires (3600).
        max_tokens_total: maximum number of tokens of the trees, context included.
        max_turns: maximum number of answered calls (256).
        history: `sampled` keeps sampled tokens in the context as they are, `template` renders them
            again.
        cache_scope: sessions that share prefixes in the prefix cache: only the `session` itself, or
            the `group`. With `group`, agents can find out by the cached tokens and the latency of
            their calls which prompts the other sessions of the group have sent.
        finish: early end of the group, by a number of finished sessions or by a deadline.
        priority: lower values are scheduled first.
        return_support: returns with each token the token ids that it was sampled from.
        top_logprobs: number of most probable tokens to return at each sampled token.
        metadata: strings that are returned with the session.
    """

    group: str | None
    adapter: str | None
    sampling: Sampling | Mapping[str, object]
    overrides: Sequence[OverridableField]
    weights: WeightsConstraint | None
    keep_kv: KeepKv | None
    ttl_seconds: float
    max_tokens_total: int | None
    max_turns: int
    history: History
    cache_scope: CacheScope
    finish: SessionsFinish | None
    priority: int
    return_support: bool
    top_logprobs: int | None
    metadata: Mapping[str, str]


class AsyncSessions:
    """Asynchronous operations on agent sessions, as `client.sessions`."""

    def __init__(self, sender: RequestSender, base_url: str) -> None:
        self._sender = sender
        self._base_url = base_url.rstrip("/")

    async def create(self, n: int = 1, **options: Unpack[SessionOptions]) -> SessionGroup:
        """Creates n sessions of one group. Retries never create more."""
        given: dict[str, object] = {**options, "n": n}
        if "overrides" in options:
            given["overrides"] = list(options["overrides"])
        is_idempotent = self._sender.retry.is_enabled
        call = json_request(
            "POST",
            "/v1/sessions",
            SessionsRequest.model_validate(given),
            headers={"Idempotency-Key": uuid.uuid4().hex} if is_idempotent else {},
            is_idempotent=is_idempotent,
        )
        answer = (await self._sender.send(call)).read(SessionsAnswer)
        sessions = tuple(
            AgentSession(
                id=start.id, base_url=start.base_url or self._base_url + start.path, key=start.key
            )
            for start in answer.sessions
        )
        return SessionGroup(id=answer.group, sessions=sessions)

    async def get(self, session_id: str) -> SessionStatus:
        """Returns the state of a session."""
        return await self._sender.get(_path(session_id), SessionStatus)

    async def tree(self, session_id: str) -> SessionResult:
        """Returns the trees of a session so far."""
        call = HttpRequest(method="GET", path=f"{_path(session_id)}/tree", is_idempotent=True)
        return await self._result(call)

    async def finish(
        self,
        session_id: str,
        *,
        reward: float | None = None,
        rewards: Mapping[str, float] | None = None,
    ) -> SessionResult:
        """Finishes a session with its reward, or with rewards by leaf, and returns its trees.

        Calls that still run are aborted. Raises InvalidRequest for rewards by leaf while calls run,
        and SessionClosed if the session has other rewards, was cancelled or has expired.
        """
        body = SessionFinishRequest(reward=reward, rewards=None if rewards is None else {**rewards})
        path = f"{_path(session_id)}/finish"
        return await self._result(json_request("POST", path, body, is_idempotent=True))

    async def cancel(self, session_id: str) -> SessionResult:
        """Cancels a session and returns its trees. A session that has ended does not change."""
        call = HttpRequest(method="DELETE", path=_path(session_id), is_idempotent=True)
        return await self._result(call)

    async def stream(
        self, group: str | None = None, *, after: int = 0
    ) -> AsyncGenerator[SessionResult, None]:
        """Yields each ended session once, in the order of `sequence`, from `after` on.

        A broken connection is resumed. The stream of a group ends when all of its sessions have
        ended. Without a group it has the sessions of the replica that answers first, and ends when
        this server stops; with several replicas, stream each group. If the replica has left the
        cluster while the connection was broken, the stream goes on with all kept sessions of the
        replica that answers.
        """
        replica: str | None = None
        last_sequences: dict[str | None, int] = {}
        retry_state = self._sender.retry_state(_stream_request(group, replica, after))
        while True:
            try:
                request = _stream_request(group, replica, after)
                async with aclosing(self._records(request)) as records:
                    async for record in records:
                        retry_state.reset()
                        if isinstance(record, SessionRecord):
                            place = _replica_of(record.session.id)
                            after = record.session.sequence or after
                            if group is None:
                                replica = place
                            if after > last_sequences.get(place, -1):
                                last_sequences[place] = after
                                yield session_result_of(record.session)
                        elif isinstance(record, SessionsEndRecord):
                            return
                if group is None:
                    return
                raise StreamBroken("the stream ended without its end record")
            except ReplicaGone:
                if replica is None:
                    raise
                replica, after = None, 0  # the sequences of another replica may be lower
            except CoppiceError as error:
                if not await retry_state.wait_before_retry(error):
                    raise

    async def _records(self, call: HttpRequest) -> AsyncGenerator[SessionsRecord, None]:
        buffer = bytearray()
        async with aclosing(self._sender.driver.receive(call)) as chunks:
            async for chunk in chunks:
                buffer += chunk
                *lines, buffer = buffer.split(b"\n") if b"\n" in chunk else [buffer]
                for line in lines:
                    yield _record_of(line)

    async def _result(self, call: HttpRequest) -> SessionResult:
        return session_result_of((await self._sender.send(call)).read(SessionAnswer))


def _path(session_id: str) -> str:
    return f"/v1/sessions/{quote(session_id, safe='')}"


def _replica_of(session_id: str) -> str | None:
    """Id of the replica that has a session; None if the id does not begin with one."""
    replica, dot, _ = session_id.partition(".")
    return replica if dot else None


def _stream_request(group: str | None, replica: str | None, after: int) -> HttpRequest:
    place = {"group": group, "replica": replica}
    return HttpRequest(
        method="GET",
        path="/v1/sessions",
        params={"after": str(after)} | {key: value for key, value in place.items() if value},
        headers={"Accept": NDJSON},
        is_idempotent=True,
    )


def _record_of(line: bytearray) -> SessionsRecord:
    try:
        return SESSIONS_RECORD.validate_json(line)
    except ValidationError as error:
        raise BadAnswer(f"a line of the stream is not a valid record: {error}") from error

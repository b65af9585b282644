"""Client operations on rollouts: run, stream, submit, attach, abort; branch or drop in trees."""

import importlib
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any, Literal, Unpack
from urllib.parse import quote

from pydantic import BaseModel

from coppice.errors import BadAnswer, EngineUnavailable, TimedOut
from coppice.operations.record_stream import NDJSON, Collector, RecordDeduplicator, stream_records
from coppice.prompts import PromptLike
from coppice.rollout_options import RolloutOptions, rollout_request, session_headers
from coppice.rollout_results import RolloutResult, Segment, result_of, result_of_packed, segment_of
from coppice.transport.messages import HttpRequest, HttpResponse, json_request
from coppice.transport.retry import RequestSender
from coppice.wire.branching import BranchRequest
from coppice.wire.packed.requests import PACKED_MEDIA_TYPE
from coppice.wire.packed.results import (
    Record,
    SampleRecord,
    SegmentRecord,
    unpack,
)
from coppice.wire.rollouts import (
    BranchAnswer,
    DropAnswer,
    RolloutAnswer,
    RolloutRequest,
    RunningAnswer,
)

_POLL_SECONDS = 30.0
"""Less than the idle timeout of common proxies."""
_SHORTEST_POLL_SECONDS = 0.5
_LEAVE_SECONDS = 5.0
"""Longest time that an unresponsive server can delay an interrupted program."""


@contextmanager
def progress_bar(
    request: RolloutRequest, *, is_enabled: bool
) -> Iterator[Callable[[Record], None]]:
    """Shows a progress bar of finished samples; yields a callback, which must get every record."""
    if not is_enabled:
        yield lambda record: None
        return
    branching = request.branching
    total = sum(group.n if branching is None else branching.max_leaves for group in request.groups)
    with _tqdm()(total=total, desc="rollout", unit="sample") as bar:

        def on_record(record: Record) -> None:
            if isinstance(record, SegmentRecord):
                bar.update(record.segment.finish_reason != "cut")
            elif isinstance(record, SampleRecord) and branching is None:
                bar.update()

        yield on_record


def _tqdm() -> Any:
    try:
        return importlib.import_module("tqdm").tqdm
    except ImportError:
        raise ImportError(
            "progress=True needs tqdm: pip install 'coppice-client[progress]'"
        ) from None


def rollout_path(rollout_id: str) -> str:
    return f"/v1/rollouts/{quote(rollout_id, safe='')}"


class AsyncPending:
    """Asynchronous handle of a submitted rollout, identified by the rollout id.

    Only `abort` ends the rollout before it completes. Any number of processes may hold a handle.
    The server deletes the result some time after the rollout ends; calls then raise NotFound.
    """

    def __init__(self, sender: RequestSender, rollout_id: str) -> None:
        self.id = rollout_id
        self._sender = sender

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    async def wait(self, seconds: float | None = None) -> RolloutResult:
        """Waits for the rollout's result. Raises TimedOut if it still runs after `seconds`.

        It may be called again after any TransportError. The result is transferred in
        packed form, which takes a third of the bytes of a stream.
        """
        clock = self._sender.clock
        deadline = None if seconds is None else clock.now() + max(seconds, 0.0)
        while True:
            started_at = clock.now()
            left = _POLL_SECONDS
            if deadline is not None:
                left = min(left, max(deadline - started_at, 0.0))
            # If the engine died, so did the rollout: EngineUnavailable is final here.
            reply = await self._sender.send(
                self._poll(left), deadline=deadline, non_retryable=(EngineUnavailable,)
            )
            if reply.status != 202:
                return _parse_result(reply)
            if deadline is not None and clock.now() >= deadline:
                raise TimedOut(f"rollout {self.id} is still running after {seconds} s")
            if clock.now() - started_at < min(_SHORTEST_POLL_SECONDS, left):
                # A server that ignores `wait` must not be polled in a tight loop.
                await clock.sleep(min(_SHORTEST_POLL_SECONDS, left))

    def stream(self) -> AsyncGenerator[Record, None]:
        """Yields all records of the rollout from the first one, like Rollouts.stream.

        Closing the generator early only closes the connection; the rollout continues.
        """
        call = HttpRequest(
            method="GET", path=rollout_path(self.id), headers={"Accept": NDJSON}, is_idempotent=True
        )
        return stream_records(self._sender, call, RecordDeduplicator())

    async def abort(self) -> RolloutResult:
        """Aborts the rollout and returns the tokens generated so far."""
        call = HttpRequest(method="DELETE", path=rollout_path(self.id), is_idempotent=True)
        return result_of((await self._sender.send(call)).read(RolloutAnswer))

    def _poll(self, seconds: float) -> HttpRequest:
        return HttpRequest(
            method="GET",
            path=rollout_path(self.id),
            params={"wait": f"{round(seconds, 3):g}"},
            headers={"Accept": PACKED_MEDIA_TYPE},
            server_wait_seconds=seconds,
            is_idempotent=True,
        )


def _parse_result(reply: HttpResponse) -> RolloutResult:
    if not reply.headers.get("content-type", "").startswith(PACKED_MEDIA_TYPE):
        return result_of(reply.read(RolloutAnswer))
    try:
        return result_of_packed(unpack(reply.body))
    except ValueError as error:
        raise BadAnswer(f"the response is not a valid packed result: {error}") from error


class RolloutOperations:
    """Client operations on rollouts, and on rollout trees that the caller grows (external mode)."""

    _sender: RequestSender

    async def rollout(
        self,
        prompts: Iterable[PromptLike],
        *,
        progress: bool = False,
        **options: Unpack[RolloutOptions],
    ) -> RolloutResult:
        """Generates samples for every prompt and waits for all of them.

        A broken connection is resumed, and retries never start a second rollout. If the call is
        cancelled or interrupted, it aborts the rollout, like closing `stream` early.

        The response is a stream of JSON records. Its progress records distinguish a long sample
        from a dead server, and keep proxies from closing an idle connection. Packed arrays take a
        third of the bytes, but arrive only at the end. `client/README.md` has measurements.
        """
        headers = session_headers(options)
        request = rollout_request(prompts, **options)
        collector = Collector()
        with progress_bar(request, is_enabled=progress) as on_record:
            async with aclosing(self._records(request, headers)) as records:
                async for record in records:
                    collector.add(record)
                    on_record(record)
        return collector.result()

    def stream(
        self, prompts: Iterable[PromptLike], **options: Unpack[RolloutOptions]
    ) -> AsyncGenerator[Record, None]:
        """Generates samples for every prompt and yields each record once, when it arrives.

        A broken connection is resumed. Once the retries are exhausted, StreamBroken or the last
        error is raised; RolloutLost if the server no longer has the rollout.

        Closing or dropping the generator early aborts the rollout: with retries by one DELETE
        request with a short timeout, with Retry.none() by closing the connection. A killed process
        sends no DELETE, so with retries its rollout runs to completion.
        """
        headers = session_headers(options)
        return self._records(rollout_request(prompts, **options), headers)

    async def submit(
        self, prompts: Iterable[PromptLike], **options: Unpack[RolloutOptions]
    ) -> AsyncPending:
        """Starts a rollout that outlives the connection; returns a handle of the rollout."""
        headers = session_headers(options)
        request = rollout_request(prompts, **options).model_copy(update={"stream": False})
        headers |= {"Prefer": "respond-async"}
        call = self._post_once("/v1/rollouts", request, headers, is_packable=True)
        reply = await self._sender.send(call)
        # A retry may find the rollout already finished.
        running = reply.status == 202
        started = reply.read(RunningAnswer) if running else reply.read(RolloutAnswer)
        return self.attach(started.id)

    def attach(self, rollout_id: str) -> AsyncPending:
        """Returns the handle of a rollout that was submitted before; sends no request."""
        return AsyncPending(self._sender, rollout_id)

    async def abort(self, rollout_id: str) -> RolloutResult:
        """Aborts a running rollout and returns the tokens generated so far."""
        return await self.attach(rollout_id).abort()

    async def branch(
        self,
        rollout_id: str,
        segment: str | None = None,
        *,
        n: int = 1,
        max_tokens: int | None = None,
        group: int = 0,
        timeout: float | None = None,
    ) -> tuple[Segment, ...]:
        """Samples n new tree segments that continue a cut segment, or the prompt; waits for them.

        The tree is a rollout submitted with Branching(mode="external"). Every call renews its
        lease; `abort` completes the tree. With max_tokens the segments are cut there, rounded up to
        the next position at which a cut costs no extra prefill. Without it, they end as samples
        do. `timeout` is the longest silence in seconds; None means no limit.
        """
        body = BranchRequest(segment=segment, group=group, n=n, max_tokens=max_tokens)
        path = f"{rollout_path(rollout_id)}/branch"
        call = self._post_once(path, body, read_timeout=timeout)
        answer = (await self._sender.send(call)).read(BranchAnswer)
        return tuple(segment_of(each) for each in answer.segments)

    async def drop_segment(self, rollout_id: str, segment: str) -> tuple[str, ...]:
        """Removes a segment and its descendants from a rollout tree; returns the removed ids.

        The tree's result reports the number of removed segments, because the remaining ones are
        then not an unbiased sample from the model.
        """
        path = f"{rollout_path(rollout_id)}/segments/{quote(segment, safe='')}"
        reply = await self._sender.send(HttpRequest(method="DELETE", path=path))
        return tuple(reply.read(DropAnswer).dropped)

    async def _records(
        self, request: RolloutRequest, headers: dict[str, str]
    ) -> AsyncGenerator[Record, None]:
        call = self._post_once(
            "/v1/rollouts", request, {"Accept": NDJSON, **headers}, is_packable=True
        )
        deduplicator = RecordDeduplicator()
        try:
            async with aclosing(stream_records(self._sender, call, deduplicator)) as records:
                async for record in records:
                    yield record
        finally:
            # With an idempotency key a closed connection does not end the rollout.
            if (
                call.is_idempotent
                and deduplicator.rollout_id is not None
                and not deduplicator.ended
            ):
                path = rollout_path(deduplicator.rollout_id)
                await self._sender.send_best_effort(
                    HttpRequest(method="DELETE", path=path, read_timeout=_LEAVE_SECONDS)
                )

    def _post_once(
        self,
        path: str,
        body: BaseModel,
        headers: Mapping[str, str] | None = None,
        *,
        read_timeout: float | Literal["usual"] | None = "usual",
        is_packable: bool = False,
    ) -> HttpRequest:
        """Builds a POST request, with an idempotency key if retries are enabled.

        With the key, a retry does not repeat the work.
        """
        is_idempotent = self._sender.retry.is_enabled
        key = {"Idempotency-Key": uuid.uuid4().hex} if is_idempotent else {}
        return json_request(
            "POST",
            path,
            body,
            headers={**(headers or {}), **key},
            read_timeout=read_timeout,
            is_idempotent=is_idempotent,
            is_packable=is_packable,
        )

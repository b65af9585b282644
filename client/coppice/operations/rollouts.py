"""Rollouts: whole, streamed, submitted, come back to, aborted."""

import uuid
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Unpack

from coppice.operations.collector import Collector
from coppice.operations.pending import AsyncPending, rollout_path
from coppice.options import RolloutOptions, rollout_request, session_headers
from coppice.progress import progress_bar
from coppice.prompts import PromptLike
from coppice.results import RolloutResult
from coppice.transport.deduplicator import RecordDeduplicator
from coppice.transport.messages import HttpRequest, json_request
from coppice.transport.record_stream import NDJSON, stream_records
from coppice.transport.request_sender import RequestSender
from coppice.wire.records import Record
from coppice.wire.rollouts import RolloutAnswer, RolloutRequest, RunningAnswer

_LEAVE_SECONDS = 5.0
"""How long an interrupted program is held up by a server that does not answer."""


class RolloutOperations:
    """Needs a courier and keeps no state beside it."""

    _sender: RequestSender

    async def rollout(
        self,
        prompts: Iterable[PromptLike],
        *,
        progress: bool = False,
        **options: Unpack[RolloutOptions],
    ) -> RolloutResult:
        """Draws samples for every prompt and waits for all of them.

        A broken connection is taken up again where it broke, and no retry starts a second rollout.
        Cancelled or interrupted, it ends the rollout, as `stream` does when it is left.

        The answer comes as a stream of JSON, whose progress records tell a long sample from a dead
        server and keep proxies from closing a silent connection. Packed arrays are a third of the
        bytes, but come only at the end: the README has figures.
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
        """Draws samples for every prompt and yields each record once, as it comes.

        A broken connection is taken up again where it broke; StreamBroken, or what else it broke
        with, once the retries are used up. RolloutLost if the server has forgotten the rollout.

        Whoever stops early, by leaving the loop and dropping or closing this generator, ends the
        rollout: with retries by a DELETE, tried once and not for long, and with Retry.none() by
        closing the connection. A process that is killed sends no DELETE; what it had asked for
        then runs to its own end, unless there were no retries.
        """
        headers = session_headers(options)
        return self._records(rollout_request(prompts, **options), headers)

    async def submit(
        self, prompts: Iterable[PromptLike], **options: Unpack[RolloutOptions]
    ) -> AsyncPending:
        """Starts a rollout that runs whether anybody listens or not, and comes back at once."""
        headers = session_headers(options)
        request = rollout_request(prompts, **options).model_copy(update={"stream": False})
        call = self._start(request, {"Prefer": "respond-async", **headers})
        reply = await self._sender.send(call)
        # A retry may find the rollout ended already.
        running = reply.status == 202
        started = reply.read(RunningAnswer) if running else reply.read(RolloutAnswer)
        return self.attach(started.id)

    def attach(self, rollout_id: str) -> AsyncPending:
        """The handle of a rollout that was submitted elsewhere. Nothing is sent."""
        return AsyncPending(self._sender, rollout_id)

    async def abort(self, rollout_id: str) -> RolloutResult:
        """Ends a running rollout. The tokens so far are kept."""
        return await self.attach(rollout_id).abort()

    async def _records(
        self, request: RolloutRequest, headers: dict[str, str]
    ) -> AsyncGenerator[Record, None]:
        call = self._start(request, {"Accept": NDJSON, **headers})
        deduplicator = RecordDeduplicator()
        try:
            async with aclosing(stream_records(self._sender, call, deduplicator)) as records:
                async for record in records:
                    yield record
        finally:
            # With a key the server outlives a closed connection, whatever closed it.
            if (
                call.is_idempotent
                and deduplicator.rollout_id is not None
                and not deduplicator.ended
            ):
                path = rollout_path(deduplicator.rollout_id)
                await self._sender.send_best_effort(
                    HttpRequest(method="DELETE", path=path, read_timeout=_LEAVE_SECONDS)
                )

    def _start(self, request: RolloutRequest, headers: dict[str, str]) -> HttpRequest:
        """With a key no retry can start a second rollout; without retries there is no need."""
        if self._sender.retry.is_enabled:
            headers["Idempotency-Key"] = uuid.uuid4().hex
        is_idempotent = "Idempotency-Key" in headers
        return json_request(
            "POST", "/v1/rollouts", request, headers=headers, is_idempotent=is_idempotent
        )

"""Rollout operations: run, stream, submit, attach, abort."""

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
"""Longest time that an unresponsive server can delay an interrupted program."""


class RolloutOperations:
    """Rollout operations."""

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
        third of the bytes, but arrive only at the end. The README has measurements.
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
        """Starts a rollout that runs independently of the connection; returns its handle."""
        headers = session_headers(options)
        request = rollout_request(prompts, **options).model_copy(update={"stream": False})
        call = self._start(request, {"Prefer": "respond-async", **headers})
        reply = await self._sender.send(call)
        # A retry may find the rollout already finished.
        running = reply.status == 202
        started = reply.read(RunningAnswer) if running else reply.read(RolloutAnswer)
        return self.attach(started.id)

    def attach(self, rollout_id: str) -> AsyncPending:
        """Returns a handle of a submitted rollout by its id, without a request."""
        return AsyncPending(self._sender, rollout_id)

    async def abort(self, rollout_id: str) -> RolloutResult:
        """Ends a running rollout and returns the tokens generated so far."""
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

    def _start(self, request: RolloutRequest, headers: dict[str, str]) -> HttpRequest:
        """Builds the request; the idempotency key prevents a retry from starting a second rollout.

        Without retries it is not needed.
        """
        if self._sender.retry.is_enabled:
            headers["Idempotency-Key"] = uuid.uuid4().hex
        is_idempotent = "Idempotency-Key" in headers
        return json_request(
            "POST", "/v1/rollouts", request, headers=headers, is_idempotent=is_idempotent
        )

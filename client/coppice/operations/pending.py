"""Handle of a submitted rollout, which runs independently of any connection."""

from collections.abc import AsyncGenerator
from urllib.parse import quote

from coppice.errors import BadAnswer, EngineUnavailable, TimedOut
from coppice.results import RolloutResult, result_of, result_of_packed
from coppice.transport.deduplicator import RecordDeduplicator
from coppice.transport.messages import HttpRequest, HttpResponse
from coppice.transport.record_stream import NDJSON, stream_records
from coppice.transport.request_sender import RequestSender
from coppice.wire.packed import MEDIA_TYPE, unpack
from coppice.wire.records import Record
from coppice.wire.rollouts import RolloutAnswer

_POLL_SECONDS = 30.0
"""Less than the idle timeout of common proxies."""
_SHORTEST_POLL_SECONDS = 0.5


def rollout_path(rollout_id: str) -> str:
    return f"/v1/rollouts/{quote(rollout_id, safe='')}"


class AsyncPending:
    """Handle of a submitted rollout, identified by its id.

    Only `abort` ends the rollout before it completes. Any number of processes may hold a handle.
    The server deletes the result some time after the rollout ends; calls then raise NotFound.
    """

    def __init__(self, sender: RequestSender, rollout_id: str) -> None:
        self.id = rollout_id
        self._sender = sender

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    async def wait(self, seconds: float | None = None) -> RolloutResult:
        """Waits for the result. Raises TimedOut if the rollout still runs after `seconds`.

        It may be called again after that and after a TransportError. The result is transferred in
        packed form, which takes a third of the bytes of a stream.
        """
        clock = self._sender.clock
        deadline = None if seconds is None else clock.now() + max(seconds, 0.0)
        while True:
            started_at = clock.now()
            left = (
                _POLL_SECONDS
                if deadline is None
                else min(_POLL_SECONDS, max(deadline - started_at, 0.0))
            )
            # If the engine died, so did the rollout: EngineUnavailable is final here.
            reply = await self._sender.send(
                self._poll(left), deadline=deadline, non_retryable=(EngineUnavailable,)
            )
            if reply.status != 202:
                return _parse_result(reply)
            if deadline is not None and clock.now() >= deadline:
                raise TimedOut(f"rollout {self.id} still runs after {seconds} s")
            if clock.now() - started_at < min(_SHORTEST_POLL_SECONDS, left):
                # A server that ignores `wait` must not be polled in a tight loop.
                await clock.sleep(min(_SHORTEST_POLL_SECONDS, left))

    def stream(self) -> AsyncGenerator[Record, None]:
        """Yields all records from the first one, like Rollouts.stream.

        Closing the generator early only closes the connection; the rollout continues.
        """
        call = HttpRequest(
            method="GET", path=rollout_path(self.id), headers={"Accept": NDJSON}, is_idempotent=True
        )
        return stream_records(self._sender, call, RecordDeduplicator())

    async def abort(self) -> RolloutResult:
        """Ends the rollout and returns the tokens generated so far."""
        call = HttpRequest(method="DELETE", path=rollout_path(self.id), is_idempotent=True)
        return result_of((await self._sender.send(call)).read(RolloutAnswer))

    def _poll(self, seconds: float) -> HttpRequest:
        return HttpRequest(
            method="GET",
            path=rollout_path(self.id),
            params={"wait": f"{round(seconds, 3):g}"},
            headers={"Accept": MEDIA_TYPE},
            server_wait_seconds=seconds,
            is_idempotent=True,
        )


def _parse_result(reply: HttpResponse) -> RolloutResult:
    if not reply.headers.get("content-type", "").startswith(MEDIA_TYPE):
        return result_of(reply.read(RolloutAnswer))
    try:
        return result_of_packed(unpack(reply.body))
    except ValueError as error:
        raise BadAnswer(f"the answer is no packed rollout: {error}") from error

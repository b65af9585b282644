"""A rollout that runs whether anybody listens or not, and the way back to it."""

from collections.abc import AsyncGenerator
from urllib.parse import quote

from coppice.errors import BadAnswer, EngineUnavailable, TimedOut
from coppice.results import RolloutResult, result_of, result_of_packed
from coppice.transport.deduplicator import Replay
from coppice.transport.messages import Call, Reply
from coppice.transport.record_stream import NDJSON, records_of
from coppice.transport.request_sender import Courier
from coppice.wire.packed import MEDIA_TYPE, unpack
from coppice.wire.records import Record
from coppice.wire.rollouts import RolloutAnswer

_POLL_SECONDS = 30.0
"""Shorter than what proxies take for a dead connection."""
_SHORTEST_POLL_SECONDS = 0.5


def path_of(rollout_id: str) -> str:
    return f"/v1/rollouts/{quote(rollout_id, safe='')}"


class AsyncPending:
    """A rollout by its id. Nothing ends it but its own end and `abort`.

    Any number of processes may hold one. The server forgets an answer some time after the end:
    NotFound from then on.
    """

    def __init__(self, courier: Courier, rollout_id: str) -> None:
        self.id = rollout_id
        self._courier = courier

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    async def wait(self, seconds: float | None = None) -> RolloutResult:
        """The whole answer; TimedOut if the rollout still runs after so many seconds.

        It may be called again, then and after a TransportError. The answer comes packed, at a
        third of the bytes of a stream.
        """
        pace = self._courier.pace
        until = None if seconds is None else pace.now() + max(seconds, 0.0)
        while True:
            asked = pace.now()
            left = _POLL_SECONDS if until is None else min(_POLL_SECONDS, max(until - asked, 0.0))
            # A rollout that died with the engine is told as just that, and does not come back.
            reply = await self._courier.send(
                self._poll(left), until=until, final=(EngineUnavailable,)
            )
            if reply.status != 202:
                return _result_in(reply)
            if until is not None and pace.now() >= until:
                raise TimedOut(f"rollout {self.id} still runs after {seconds} s")
            if pace.now() - asked < min(_SHORTEST_POLL_SECONDS, left):
                # Whoever does not hold the answer back must not be asked without a pause.
                await pace.sleep(min(_SHORTEST_POLL_SECONDS, left))

    def stream(self) -> AsyncGenerator[Record, None]:
        """All records from the first one on, as Rollouts.stream yields them.

        Leaving it early only closes the connection; the rollout goes on.
        """
        call = Call(
            method="GET", path=path_of(self.id), headers={"Accept": NDJSON}, repeatable=True
        )
        return records_of(self._courier, call, Replay())

    async def abort(self) -> RolloutResult:
        """Ends the rollout. The tokens so far are kept."""
        call = Call(method="DELETE", path=path_of(self.id), repeatable=True)
        return result_of((await self._courier.send(call)).read(RolloutAnswer))

    def _poll(self, seconds: float) -> Call:
        return Call(
            method="GET",
            path=path_of(self.id),
            params={"wait": f"{round(seconds, 3):g}"},
            headers={"Accept": MEDIA_TYPE},
            held_seconds=seconds,
            repeatable=True,
        )


def _result_in(reply: Reply) -> RolloutResult:
    if not reply.headers.get("content-type", "").startswith(MEDIA_TYPE):
        return result_of(reply.read(RolloutAnswer))
    try:
        return result_of_packed(unpack(reply.body))
    except ValueError as error:
        raise BadAnswer(f"the answer is no packed rollout: {error}") from error

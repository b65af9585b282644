"""Turns of clients at a resource that one of them uses at a time."""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from engine.errors import ChecksQueueFull


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLimits:
    """Maximum size of waiting work in bytes, per client and over all clients."""

    client_bytes: int
    total_bytes: int


class _Turn(NamedTuple):
    begun: asyncio.Future[None]
    num_bytes: int


class FairTurns:
    """Round robin between clients, FIFO within each.

    The client whose turn ends goes behind all that wait. So one client delays another by one turn
    at most, however much work it has queued. Used from one event loop.
    """

    def __init__(self, limits: TurnLimits) -> None:
        self._limits = limits
        self._queues: dict[str, deque[_Turn]] = {}
        self._current: str | None = None

    async def acquire(self, client: str, num_bytes: int) -> None:
        """Wait for a turn, which `release` ends. Raises ChecksQueueFull if too much work waits."""
        if self._current is None:
            self._current = client
            return
        self._check_room(client, num_bytes)
        turn = _Turn(asyncio.get_running_loop().create_future(), num_bytes)
        self._queues.setdefault(client, deque()).append(turn)
        try:
            await turn.begun
        except asyncio.CancelledError:
            if turn.begun.cancelled():
                self._remove(client, turn)
            else:  # it began before the cancelled caller could run
                self.release()
            raise

    def release(self) -> None:
        """End the current turn and begin the next one."""
        last, self._current = self._current, None
        assert last is not None, "a turn is released once"
        if last in self._queues:
            self._queues[last] = self._queues.pop(last)
        for client, turns in self._queues.items():
            self._current = client
            turn = turns[0]
            self._remove(client, turn)
            turn.begun.set_result(None)
            return

    def _check_room(self, client: str, num_bytes: int) -> None:
        of_client = _size(self._queues.get(client, ()))
        if of_client and of_client + num_bytes > self._limits.client_bytes:
            raise ChecksQueueFull(of_client=True)
        if sum(map(_size, self._queues.values())) + num_bytes > self._limits.total_bytes:
            raise ChecksQueueFull(of_client=False)

    def _remove(self, client: str, turn: _Turn) -> None:
        turns = self._queues[client]
        turns.remove(turn)
        if not turns:
            del self._queues[client]


def _size(turns: "deque[_Turn] | tuple[()]") -> int:
    return sum(turn.num_bytes for turn in turns)

"""Turns of clients at a resource that few of them use at a time."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from engine.errors import ChecksQueueFull

NUM_TURNS: Final = 2
LONG_SECONDS: Final = 2.0
"""A client whose turn takes longer is slow for a while."""
SLOW_SECONDS: Final = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLimits:
    """Maximum size of waiting work in bytes, per client and over all clients."""

    client_bytes: int
    total_bytes: int


class _Turn(NamedTuple):
    begun: asyncio.Future[None]
    num_bytes: int


class FairTurns:
    """Round robin between clients, FIFO within each, with one turn per client at a time.

    The client whose turn ends goes behind all that wait. At most one slow client has a turn, so
    slow clients leave a turn to the others. Used from one event loop.
    """

    def __init__(self, limits: TurnLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._queues: dict[str, deque[_Turn]] = {}
        self._began_at: dict[str, float] = {}
        self._slow_until: dict[str, float] = {}

    async def acquire(self, client: str, num_bytes: int) -> None:
        """Wait for a turn, which `release` ends. Raises ChecksQueueFull if too much work waits."""
        if client not in self._queues and self._may_begin(client):
            self._began_at[client] = self._clock()
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
                self.release(client)
            raise

    def release(self, client: str) -> None:
        """End the client's turn and begin the next ones."""
        now = self._clock()
        if now - self._began_at.pop(client) > LONG_SECONDS:
            self._slow_until[client] = now + SLOW_SECONDS
        if client in self._queues:
            self._queues[client] = self._queues.pop(client)
        for waiting in list(self._queues):
            if self._may_begin(waiting):
                turn = self._queues[waiting][0]
                self._remove(waiting, turn)
                self._began_at[waiting] = now
                turn.begun.set_result(None)

    def _may_begin(self, client: str) -> bool:
        if client in self._began_at or len(self._began_at) >= NUM_TURNS:
            return False
        return not (self._is_slow(client) and any(map(self._is_slow, self._began_at)))

    def _is_slow(self, client: str) -> bool:
        if self._slow_until.get(client, 0.0) <= self._clock():
            self._slow_until.pop(client, None)
        return client in self._slow_until

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

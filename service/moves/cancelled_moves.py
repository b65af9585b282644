"""Moves that their senders have cancelled, which are refused if they arrive later."""

from collections import OrderedDict
from collections.abc import Callable

CANCELLED_SECONDS = 60.0
MAX_CANCELLED = 1024


class CancelledMoves:
    """Ids of rollouts or sessions that their senders have kept in the last minute."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: OrderedDict[str, float] = OrderedDict()

    def __contains__(self, moved_id: str) -> bool:
        return self._until.get(moved_id, 0.0) > self._clock()

    def add(self, moved_id: str) -> None:
        self._until[moved_id] = self._clock() + CANCELLED_SECONDS
        if len(self._until) > MAX_CANCELLED:
            self._until.popitem(last=False)

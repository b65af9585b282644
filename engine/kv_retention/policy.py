"""Policy of KV retention: which KV of paused sessions is worth most. No I/O and no clock.

A block is worth the prefill that it saves, divided by the time until its session is expected to
return: the prefill that it saves per second in which it occupies memory.
"""

from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass
from typing import Final

MAX_RECENT_PAUSES: Final = 512
SESSION_WEIGHT: Final = 0.3
"""Weight of the latest pause in the mean of a session."""
PRIOR_PAUSES: Final = 2
"""Number of its own pauses after which a session's mean counts as much as all sessions' pauses."""
DEFAULT_PAUSE_SECONDS: Final = 10.0
MIN_SECONDS: Final = 0.1
ATTENTION_TOKENS: Final = 32_768
"""Path length at which attention about doubles the cost of a token's prefill, in 7B models."""


@dataclass(slots=True)
class SessionPauses:
    """Exponentially weighted mean of one session's tool pauses."""

    count: int = 0
    mean_seconds: float = 0.0

    def add(self, seconds: float) -> None:
        weight = SESSION_WEIGHT if self.count else 1.0
        self.mean_seconds += weight * (seconds - self.mean_seconds)
        self.count += 1


class ReturnPredictor:
    """Predicts when a paused session returns, from its own pauses and those of all sessions."""

    def __init__(self, max_pauses: int = MAX_RECENT_PAUSES) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        self._max_pauses = max_pauses

    def add(self, pauses: SessionPauses, seconds: float) -> None:
        """Record an observed pause of the session with these pauses."""
        pauses.add(seconds)
        if len(self._recent) == self._max_pauses:
            oldest = self._recent.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._recent.append(seconds)
        insort(self._sorted, seconds)

    def remaining_seconds(self, pauses: SessionPauses, idle_seconds: float) -> float:
        """Expected time until a session returns that has been paused for `idle_seconds`."""
        own = _remaining(pauses.mean_seconds, idle_seconds)
        weight = pauses.count / (pauses.count + PRIOR_PAUSES)
        return weight * own + (1 - weight) * self._remaining_of_all(idle_seconds)

    def _remaining_of_all(self, idle_seconds: float) -> float:
        """Median remaining time of the recent pauses that were longer; else as long again."""
        if not self._recent:
            return _remaining(DEFAULT_PAUSE_SECONDS, idle_seconds)
        first = bisect_right(self._sorted, idle_seconds)
        if first == len(self._sorted):
            return max(idle_seconds, MIN_SECONDS)
        return self._sorted[(first + len(self._sorted)) // 2] - idle_seconds


def block_value(num_tokens: int, remaining_seconds: float, rank: int) -> float:
    """Value of a block of a path with `num_tokens` tokens.

    `rank` counts the paths of the session from the latest one on, which has rank 1. A session
    continues one of its paths, so a session with many paths cannot displace all others.
    """
    cost = 1 + num_tokens / ATTENTION_TOKENS
    return cost / (max(remaining_seconds, MIN_SECONDS) * rank)


def _remaining(expected_seconds: float, idle_seconds: float) -> float:
    """Time until the expected end of a pause; a pause that is overdue lasts as long again."""
    if idle_seconds < expected_seconds:
        return expected_seconds - idle_seconds
    return max(idle_seconds, MIN_SECONDS)

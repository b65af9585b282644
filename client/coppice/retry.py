"""How often a failed call is tried again, and how long that may go on."""

from dataclasses import dataclass
from typing import Self

_MOST_DOUBLINGS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Waits between two attempts double from base_seconds to max_seconds, times a random share.

    Where the server says when to come back, that is waited for as well. One run of failures lasts
    from the first of them until something new is heard: a stream that breaks, goes on and breaks
    again has begun a new one.
    """

    attempts: int = 8
    """The first one included."""
    base_seconds: float = 0.5
    max_seconds: float = 30.0
    total_seconds: float = 300.0
    """No attempt begins later than this after the first failure."""

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError("attempts must be at least 1")
        if not 0 <= self.base_seconds <= self.max_seconds or not self.total_seconds >= 0:
            raise ValueError("want 0 <= base_seconds <= max_seconds and 0 <= total_seconds")

    @classmethod
    def none(cls) -> Self:
        """Every failure is raised at once, and a closed connection cancels its rollout."""
        return cls(attempts=1)

    @property
    def is_enabled(self) -> bool:
        return self.attempts > 1

    def longest_wait(self, failures: int) -> float:
        """Seconds to wait at most, before the random share, after so many failures in a row."""
        doublings = min(failures - 1, _MOST_DOUBLINGS)
        return min(self.max_seconds, self.base_seconds * 2.0**doublings)

"""Retry policy: number of attempts, backoff and time limit."""

from dataclasses import dataclass
from typing import Self

_MOST_DOUBLINGS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Exponential backoff with jitter.

    The delay doubles from base_seconds to max_seconds and is multiplied by a random factor. A
    retry-after value from the server is waited for in addition. A sequence of failures starts with
    its first failure and ends when new data is received: a stream that breaks, resumes and breaks
    again starts a new sequence.
    """

    attempts: int = 8
    """Maximum number of attempts, including the first."""
    base_seconds: float = 0.5
    max_seconds: float = 30.0
    total_seconds: float = 300.0
    """No attempt starts later than this after the first failure."""

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError("attempts must be at least 1")
        if not 0 <= self.base_seconds <= self.max_seconds or not self.total_seconds >= 0:
            raise ValueError("want 0 <= base_seconds <= max_seconds and 0 <= total_seconds")

    @classmethod
    def none(cls) -> Self:
        """No retries: every failure is raised, and a closed connection cancels its rollout."""
        return cls(attempts=1)

    @property
    def is_enabled(self) -> bool:
        return self.attempts > 1

    def longest_wait(self, failures: int) -> float:
        """Upper bound of the delay in seconds after that many consecutive failures."""
        doublings = min(failures - 1, _MOST_DOUBLINGS)
        return min(self.max_seconds, self.base_seconds * 2.0**doublings)

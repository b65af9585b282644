"""Break-even estimate: fetching a prompt's KV against recomputing it.

Both rates are measured: bytes per second of each transport, and tokens per second of the caller's
own forward. While one of them is unknown, fetching is preferred.
"""

from coppice.wire.kv import KvHandle

LATEST_WEIGHT = 0.3


class BreakEven:
    """Moving averages of both rates. Not thread-safe: a race can only lose a measurement."""

    def __init__(self) -> None:
        self.bytes_per_second: dict[str, float] = {}
        self.tokens_per_second: float | None = None

    def fetched(self, transport: str, num_bytes: int, seconds: float) -> None:
        before = self.bytes_per_second.get(transport)
        self.bytes_per_second[transport] = _moving_average(before, num_bytes / max(seconds, 1e-9))

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Records the duration of the caller's forward over num_tokens prompt tokens."""
        self.tokens_per_second = _moving_average(
            self.tokens_per_second, num_tokens / max(seconds, 1e-9)
        )

    def is_worth_fetching(self, handle: KvHandle, transport: str) -> bool:
        bandwidth = self.bytes_per_second.get(transport)
        if bandwidth is None or self.tokens_per_second is None:
            return True
        return handle.num_bytes / bandwidth < handle.num_tokens / self.tokens_per_second


def _moving_average(before: float | None, latest: float) -> float:
    return latest if before is None else before + LATEST_WEIGHT * (latest - before)

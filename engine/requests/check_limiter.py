"""Limit of the checks of structured outputs that run at a time, with one place for slow keys."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from anyio import CapacityLimiter

from engine.fair_limiter import FairLimiter

NUM_CHECKS: Final = 2
"""Number of checks that run at a time, of different keys."""
CLIENT_BYTES: Final = 4 * 2**20
TOTAL_BYTES: Final = 16 * 2**20
LONG_SECONDS: Final = 2.0
"""A key with a check that takes more CPU time is slow for a while."""
SLOW_SECONDS: Final = 600.0


class CheckLimiter(FairLimiter):
    """Turns of keys at two places, of which all slow keys share one.

    Thus the long checks of many keys do not delay a key without one, with an exception: a key is
    not slow before its first long check has ended. Two keys that begin such checks at the same time
    delay all others until one has ended, for about `LIMIT_SECONDS`. This is possible once per key
    and ten minutes, and only the operator adds keys.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(
            "structured outputs", NUM_CHECKS, key_bytes=CLIENT_BYTES, total_bytes=TOTAL_BYTES
        )
        self._clock = clock
        self._slow = CapacityLimiter(1)
        self._slow_until: dict[str, float] = {}

    @property
    def num_waiting(self) -> int:
        return super().num_waiting + self._slow.statistics().tasks_waiting

    def record(self, client: str, cpu_seconds: float) -> None:
        """Make a client's key slow for a while if a check of it took long.

        Entries that have expired are dropped. Two long checks run at a time, so that one ends each
        second at most, and about 600 entries are kept.
        """
        if cpu_seconds > LONG_SECONDS:
            now, key = self._clock(), _key(client)
            kept = {name: end for name, end in self._slow_until.items() if end > now}
            self._slow_until = kept | {key: now + SLOW_SECONDS}

    def _in_order(
        self, client: str, limiters: Iterable[CapacityLimiter]
    ) -> Iterator[CapacityLimiter]:
        *own, of_all = limiters
        yield from own
        if self._slow_until.get(_key(client), 0.0) > self._clock():
            yield self._slow
        yield of_all


def _key(client: str) -> str:
    """The key of a client, to which the slow checks of its agent sessions belong."""
    return client.partition("/")[0]

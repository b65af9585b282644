"""The idempotency keys that are this replica's, and what the directory is yet to hear of them.

What was released, and after a loss what is claimed, is told with the heartbeats. A place may be
claimed anew, or released, while the directory is told of it.
"""

from collections.abc import Awaitable, Callable

CLAIMS_A_BEAT = 2000


class Claims:
    """`claim` and `release` tell the directory of one place; DirectoryLost."""

    def __init__(
        self,
        *,
        claim: Callable[[str], Awaitable[object]],
        release: Callable[[str], Awaitable[None]],
    ) -> None:
        self._claim = claim
        self._release = release
        self._claimed: set[str] = set()
        self._released: set[str] = set()
        self._untold: set[str] = set()

    def add(self, place: str) -> None:
        self._claimed.add(place)

    def discard(self, place: str) -> None:
        """It never became ours."""
        self._claimed.discard(place)

    def release(self, place: str) -> bool:
        """Whether the directory is yet to hear that it is free. Again changes nothing."""
        if place in self._claimed:
            self._claimed.remove(place)
            self._released.add(place)
        return place in self._released

    async def tell_released(self, place: str) -> None:
        """At once: nobody claims the place here meanwhile."""
        await self._release(place)
        self._released.discard(place)

    def forgotten(self) -> None:
        """By the directory: it is to hear of all of them again."""
        self._untold |= self._claimed

    async def tell(self) -> bool:
        """Whether all is told; not so many at once that the next heartbeat would be late."""
        for _ in range(min(len(self._released), CLAIMS_A_BEAT)):
            place = self._released.pop()
            if place in self._claimed:
                continue
            try:
                await self._release(place)
            except BaseException:
                self._released.add(place)
                raise
            if place in self._claimed:
                self._untold.add(place)
        for _ in range(min(len(self._untold), CLAIMS_A_BEAT)):
            place = self._untold.pop()
            if place in self._claimed:
                await self._claim(place)
                if place not in self._claimed:
                    self._released.add(place)
        return not (self._untold or self._released)

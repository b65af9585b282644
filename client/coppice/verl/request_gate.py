"""Whether requests may start, and when all that may have been started are known."""

import asyncio


class Gate:
    """Lives on one event loop. Open at first."""

    def __init__(self) -> None:
        self._open = True
        self._rejecting = False
        self._turned = asyncio.Event()
        self._starting = 0
        self._settled = asyncio.Event()
        self._settled.set()

    async def enter(self) -> bool:
        """Waits while it is shut; False if whoever comes is turned away. `entered` must follow."""
        while not self._open:
            if self._rejecting:
                return False
            await self._turned.wait()
        self._starting += 1
        self._settled.clear()
        return True

    def entered(self) -> None:
        """Whoever entered can be found now, or has failed."""
        self._starting -= 1
        if self._starting == 0:
            self._settled.set()

    async def shut(self, *, reject: bool) -> None:
        """Nobody is on the way in any more when this returns."""
        self._turn(is_open=False, rejecting=reject)
        await self._settled.wait()

    def open(self) -> None:
        self._turn(is_open=True, rejecting=False)

    def _turn(self, *, is_open: bool, rejecting: bool) -> None:
        self._open, self._rejecting = is_open, rejecting
        turned, self._turned = self._turned, asyncio.Event()
        turned.set()

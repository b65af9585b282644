"""Whether requests may start, and when all that may have been started are known."""

import asyncio


class RequestGate:
    """Lives on one event loop. Open at first."""

    def __init__(self) -> None:
        self._open = True
        self._rejecting = False
        self._state_changed = asyncio.Event()
        self._num_starting = 0
        self._none_starting = asyncio.Event()
        self._none_starting.set()

    async def admit(self) -> bool:
        """Waits while it is shut; False if whoever comes is turned away. `admitted` must follow."""
        while not self._open:
            if self._rejecting:
                return False
            await self._state_changed.wait()
        self._num_starting += 1
        self._none_starting.clear()
        return True

    def admitted(self) -> None:
        """Whoever entered can be found now, or has failed."""
        self._num_starting -= 1
        if self._num_starting == 0:
            self._none_starting.set()

    async def shut(self, *, reject: bool) -> None:
        """Nobody is on the way in any more when this returns."""
        self._set_state(is_open=False, rejecting=reject)
        await self._none_starting.wait()

    def open(self) -> None:
        self._set_state(is_open=True, rejecting=False)

    def _set_state(self, *, is_open: bool, rejecting: bool) -> None:
        self._open, self._rejecting = is_open, rejecting
        state_changed, self._state_changed = self._state_changed, asyncio.Event()
        state_changed.set()

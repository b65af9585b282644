"""Gate for new requests, which knows when all admitted requests have been submitted."""

import asyncio


class RequestGate:
    """Gate on one event loop, initially open."""

    def __init__(self) -> None:
        self._open = True
        self._rejecting = False
        self._state_changed = asyncio.Event()
        self._num_starting = 0
        self._none_starting = asyncio.Event()
        self._none_starting.set()

    async def admit(self) -> bool:
        """Waits while the gate is shut; False if it rejects. `admitted` must follow True."""
        while not self._open:
            if self._rejecting:
                return False
            await self._state_changed.wait()
        self._num_starting += 1
        self._none_starting.clear()
        return True

    def admitted(self) -> None:
        """Reports that an admitted request has been submitted, or has failed."""
        self._num_starting -= 1
        if self._num_starting == 0:
            self._none_starting.set()

    async def shut(self, *, reject: bool) -> None:
        """Shuts the gate and waits until no admitted request is still being submitted."""
        self._set_state(is_open=False, rejecting=reject)
        await self._none_starting.wait()

    def open(self) -> None:
        self._set_state(is_open=True, rejecting=False)

    def _set_state(self, *, is_open: bool, rejecting: bool) -> None:
        self._open, self._rejecting = is_open, rejecting
        state_changed, self._state_changed = self._state_changed, asyncio.Event()
        state_changed.set()

"""What signals do: the first drains and then ends the server, the second ends it at once.

While it drains the server still listens, so that whoever comes is told to go elsewhere instead of
being met by silence, and whoever waits can still be answered.
"""

import asyncio
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import uvicorn

from engine.protocol import EngineHealth

SIGNALS = (signal.SIGINT, signal.SIGTERM)

log = logging.getLogger(__name__)


class ServerLifecycle(Protocol):
    """What the runner asks of the server behind the app."""

    def health(self) -> EngineHealth: ...

    async def drain(self, seconds: float) -> None: ...

    def kill(self) -> None: ...


class GracefulShutdown:
    """Lives on the event loop that serves."""

    def __init__(
        self, lifecycle: ServerLifecycle, listener: uvicorn.Server, *, drain_seconds: float
    ) -> None:
        self._lifecycle = lifecycle
        self._listener = listener
        self._drain_seconds = drain_seconds
        self._drain_task: asyncio.Task[None] | None = None

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        before = {number: signal.getsignal(number) for number in SIGNALS}
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    def _on_signal(self) -> None:
        if self._drain_task is None:
            log.info("draining for up to %.0f s; a second signal ends at once", self._drain_seconds)
            self._drain_task = asyncio.create_task(self._drain())
        else:
            log.warning("ending at once")
            self._lifecycle.kill()
            self._drain_task.cancel()
            # Here as well: a task that is cancelled before its first step runs nothing at all.
            self._listener.should_exit = True

    async def _drain(self) -> None:
        await self._lifecycle.drain(self._drain_seconds)
        self._listener.should_exit = True

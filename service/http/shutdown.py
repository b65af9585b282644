"""Graceful shutdown on signals: the first drains and stops the server, the second stops it at once.

The server keeps listening during the drain: new requests get a 503 instead of a refused connection,
and waiting requests are still answered.
"""

import asyncio
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import uvicorn

from engine.types import EngineHealth

SIGNALS = (signal.SIGINT, signal.SIGTERM)

log = logging.getLogger(__name__)


class ServerLifecycle(Protocol):
    """Operations of the server that its runner uses."""

    def health(self) -> EngineHealth: ...

    async def drain(self, seconds: float) -> None: ...

    def kill(self) -> None: ...


class GracefulShutdown:
    """Signal handlers that drain and stop the server. Used on the serving event loop."""

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
            # Set here too: a task that is cancelled before its first step runs no code.
            self._listener.should_exit = True

    async def _drain(self) -> None:
        await self._lifecycle.drain(self._drain_seconds)
        self._listener.should_exit = True

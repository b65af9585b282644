"""Graceful shutdown: signal handlers, drain, and a deadline for the exit of the process."""

import asyncio
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import uvicorn

from engine.types.info import EngineHealth

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
KILL_SECONDS = 5.0
LOG_SECONDS = 1.0


class ServerLifecycle(Protocol):
    """Operations of `Server` that `run_server` uses."""

    def health(self) -> EngineHealth: ...

    def is_ready(self) -> bool: ...

    async def drain(self, seconds: float) -> None: ...

    def kill(self) -> None: ...


class StopDeadline:
    """Limit of the time until the exit of the process, at most `seconds` after the drain.

    When it has passed, a thread kills the engine's processes and ends this process at once. The
    event loop, the engine or a thread that the interpreter joins may hang by then, and hold a lock
    of logging. Files that are left over are removed by the next start, as after SIGKILL.
    """

    def __init__(
        self,
        lifecycle: ServerLifecycle,
        seconds: float,
        *,
        exit_process: Callable[[int], object] = os._exit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lifecycle = lifecycle
        self._seconds = seconds
        self._exit_process = exit_process
        self._clock = clock
        self._timer: threading.Timer | None = None
        self.ends_at = math.inf

    def start(self, *, drain_seconds: float = 0.0) -> None:
        """Start the time. A later call only shortens it, and the exit of the process ends it."""
        now = self._clock()
        ends_at = now + drain_seconds + self._seconds
        if ends_at >= self.ends_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self.ends_at = ends_at
        self._timer = threading.Timer(ends_at - now, self._on_passed)
        self._timer.daemon = True
        self._timer.start()

    def _on_passed(self) -> None:
        try:
            _run_in_thread(self._lifecycle.kill, KILL_SECONDS)
            _run_in_thread(self._log, LOG_SECONDS)
        finally:
            self._exit_process(1)

    def _log(self) -> None:
        log.error("the server did not stop within %.0f s after the drain", self._seconds)


def _run_in_thread(call: Callable[[], None], seconds: float) -> None:
    """Call a function that may raise or hang, and wait for its end for at most `seconds`."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)


@contextmanager
def signal_handlers(on_signal: Callable[[], None]) -> Iterator[None]:
    """Context manager in which SIGINT and SIGTERM call `on_signal` on the running event loop."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


class GracefulShutdown:
    """Drain and stop of the server by signals. Used on the serving event loop."""

    def __init__(
        self,
        lifecycle: ServerLifecycle,
        listener: uvicorn.Server,
        *,
        drain_seconds: float,
        deadline: StopDeadline | None = None,
    ) -> None:
        self._lifecycle = lifecycle
        self._listener = listener
        self._deadline = deadline
        self._drain_seconds = drain_seconds
        self._drain_task: asyncio.Task[None] | None = None

    def on_signal(self) -> None:
        if self._drain_task is None:
            log.info(
                "draining for up to %.0f s; a second signal stops at once", self._drain_seconds
            )
            if self._deadline is not None:
                self._deadline.start(drain_seconds=self._drain_seconds)
            self._drain_task = asyncio.create_task(self._drain())
        else:
            log.warning("stopping at once")
            self._lifecycle.kill()
            self._drain_task.cancel()
            # Here too: a task that is cancelled before its first step runs no code.
            self._stop_listening()

    async def _drain(self) -> None:
        try:
            await self._lifecycle.drain(self._drain_seconds)
        finally:
            self._stop_listening()

    def _stop_listening(self) -> None:
        if self._deadline is not None and not self._listener.should_exit:
            self._deadline.start()
        self._listener.should_exit = True

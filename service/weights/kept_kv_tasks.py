"""Background work on kept KV after each activation: its measurement and its recomputation.

Both are repeated until the next activation: samples that run across one end later, and chains whose
next calls overtake a measurement have no older KV any more. The engine limits their cost.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from engine.errors import EngineError
from engine.protocol import Engine
from service.rollouts.fairness import PriorityAging

LOWEST_PRIORITY: Final = 2**31
REPEAT_SECONDS: Final = 5.0

log = logging.getLogger(__name__)


class KeptKvTasks:
    """Task that has the engine measure kept KV, and compute it again where it is too old.

    KV is measured first, because the results decide which KV is too old. An activation ends the
    task of the one before it.
    """

    def __init__(
        self,
        engine: Engine,
        priority_aging: PriorityAging,
        *,
        repeat_seconds: float = REPEAT_SECONDS,
    ) -> None:
        self._engine = engine
        self._repeat_seconds = repeat_seconds
        self._priority_aging = priority_aging
        self._tasks: asyncio.TaskGroup | None = None
        self._running: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Context manager in which activations start the task."""
        async with asyncio.TaskGroup() as self._tasks:
            try:
                yield
            finally:
                self._tasks = None
                self._cancel()

    def on_weights_changed(self) -> None:
        """Start the task for the new weights."""
        self._cancel()
        if self._tasks is not None:
            self._running = self._tasks.create_task(self._run(), name="kept-kv")

    def _cancel(self) -> None:
        if self._running is not None:
            self._running.cancel()

    async def _run(self) -> None:
        try:
            while True:
                priority = self._priority_aging.to_engine_priority(LOWEST_PRIORITY)
                await self._engine.measure_kept_kv(priority)
                if not await self._engine.refresh_kept_kv(priority):
                    await asyncio.sleep(self._repeat_seconds)
        except* EngineError as failures:
            log.warning("kept KV is not measured any more: %s", failures.exceptions[0])
        except* Exception:
            log.exception("the measurement or recomputation of kept KV failed")

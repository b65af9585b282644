"""Measurement of the divergence of kept KV after each activation, in the background.

It is repeated until the next activation: samples that run across one end later, and chains whose
next calls overtake a measurement have no older KV any more. The engine limits its cost per update.
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


class DivergenceProbes:
    """Task that has the engine measure kept KV; an activation ends the measurement before it."""

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
        self._measuring: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Context manager in which activations start measurements."""
        async with asyncio.TaskGroup() as self._tasks:
            try:
                yield
            finally:
                self._tasks = None
                self._cancel()

    def on_activated(self) -> None:
        """Start a measurement. Call it once the new weights are served."""
        self._cancel()
        if self._tasks is not None:
            self._measuring = self._tasks.create_task(self._measure(), name="kv-divergence")

    def _cancel(self) -> None:
        if self._measuring is not None:
            self._measuring.cancel()

    async def _measure(self) -> None:
        try:
            while True:
                priority = self._priority_aging.to_engine_priority(LOWEST_PRIORITY)
                await self._engine.measure_kept_kv(priority)
                await asyncio.sleep(self._repeat_seconds)
        except* EngineError as failures:
            log.warning("the divergence of kept KV was not measured: %s", failures.exceptions[0])
        except* Exception:
            log.exception("the measurement of the divergence of kept KV failed")

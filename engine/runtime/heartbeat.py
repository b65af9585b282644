"""Health check of the engine: pings EngineCore every second, checks process states.

A ping is answered by EngineCore's busy loop, so a response means that steps are executed. A worker
that hangs in a step blocks EngineCore and is detected in the same way. A stopped or dead worker is
detected by its process state even while the engine is idle. Starting and loading weights block the
loop for long, so these stages have their own timeouts.

Timeouts count only the time in which the task `watch` was running. While the service is suspended
or its event loop is blocked, no ping can be read, and the delay is not the engine's.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.types.info import EngineHealth, EngineStage

INTERVAL_SECONDS = 1.0
MAX_GAP_SECONDS = 2 * INTERVAL_SECONDS
"""Maximum time between two wake-ups of `watch` that counts towards timeouts."""
_STOPPED_STATES = "TtZX"


class Heartbeat:
    """Pings EngineCore, and judges by the time since its last answer whether the engine is alive.

    Owned by the engine, which runs `run` as a task. Read `health` from the event loop.
    """

    def __init__(
        self, *, timeouts: dict[EngineStage, float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bounds = timeouts
        self._clock = clock
        self._stage: EngineStage = "starting"
        self._woken_at: float | None = None
        self._stalled_seconds = 0.0
        self._last_beat = self._now()
        self._dead: str | None = None
        self.is_asleep = False

    @property
    def stage(self) -> EngineStage:
        return "dead" if self._dead else self._stage

    def set_stage(self, stage: EngineStage) -> None:
        self._stage = stage
        self._last_beat = self._now()

    @contextmanager
    def activating(self) -> Iterator[None]:
        """Change of weights or memory; afterwards the engine serves, or sleeps if it is asleep."""
        self.set_stage("activating")
        try:
            yield
        finally:
            self.set_stage("sleeping" if self.is_asleep else "serving")

    def mark_dead(self, reason: str) -> None:
        self._dead = self._dead or reason

    def health(self) -> EngineHealth:
        age = self._now() - self._last_beat
        is_late = age > self._bounds.get(self._stage, float("inf"))
        reason = self._dead or (f"no heartbeat for {age:.1f} s" if is_late else None)
        return EngineHealth(stage=self.stage, alive=reason is None, age_seconds=age, reason=reason)

    async def watch(
        self, hang_seconds: float, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        """Return when the heartbeat is late by `hang_seconds` more than its timeout."""
        self._wake()
        while not self._is_hung(hang_seconds):
            await sleep(INTERVAL_SECONDS)
            self._wake()

    def _is_hung(self, seconds: float) -> bool:
        health = self.health()
        return health.age_seconds > self._bounds.get(health.stage, float("inf")) + seconds

    def _wake(self) -> None:
        self._stalled_seconds += self._stall()
        self._woken_at = self._clock()

    def _stall(self) -> float:
        """Seconds by which the next wake-up of `watch` is overdue; zero before `watch` runs."""
        if self._woken_at is None:
            return 0.0
        return max(0.0, self._clock() - self._woken_at - MAX_GAP_SECONDS)

    def _now(self) -> float:
        """Monotonic time, minus the time in which the task `watch` could not run."""
        return self._clock() - self._stalled_seconds - self._stall()

    async def run(self, ping: Callable[[], Awaitable[object]], processes: Collection[int]) -> None:
        """Ping until cancelled. A ping counts only if every process of the engines is running.

        Processes are given by their PIDs, because workers of several engines have equal names.
        """
        while self._dead is None:
            await ping()
            if not any(_process_state(pid) in _STOPPED_STATES for pid in processes):
                self._last_beat = self._now()
            await asyncio.sleep(INTERVAL_SECONDS)


def _process_state(pid: int) -> str:
    """State letter of a process, as in proc_pid_stat(5); X if the process does not exist."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "X"
    return stat.rpartition(")")[2].split()[0]

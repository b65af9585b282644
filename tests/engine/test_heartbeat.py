"""Heartbeat timeouts, on a fake clock."""

import asyncio
import os
import subprocess
import sys

from engine.runtime.heartbeat import Heartbeat


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def heartbeat(clock: Clock) -> Heartbeat:
    return Heartbeat(timeouts={"starting": 60, "serving": 10, "activating": 600}, clock=clock)


def test_each_stage_has_its_own_timeout() -> None:
    clock = Clock()
    beating = heartbeat(clock)
    for stage, bound in (("starting", 60), ("serving", 10), ("activating", 600)):
        beating.set_stage(stage)  # type: ignore[arg-type]
        clock.now += bound
        assert beating.health().alive
        clock.now += 1
        is_late = beating.health()
        assert not is_late.alive
        assert is_late.reason == f"no heartbeat for {bound + 1:.1f} s"


def test_entering_a_stage_is_a_heartbeat() -> None:
    clock = Clock()
    beating = heartbeat(clock)
    clock.now += 1000
    beating.set_stage("serving")
    assert beating.health().age_seconds == 0


def test_death_is_final_and_keeps_its_first_reason() -> None:
    beating = heartbeat(Clock())
    beating.mark_dead("first")
    beating.mark_dead("second")
    beating.set_stage("serving")
    assert (beating.health().stage, beating.health().reason) == ("dead", "first")


async def watch(beating: Heartbeat, clock: Clock, *gaps: float, hang_seconds: float) -> bool:
    """True if the watchdog ended, over wake-ups that are `gaps` seconds apart."""
    left = list(gaps)

    async def sleep(seconds: float) -> None:
        if not left:
            await asyncio.Event().wait()
        clock.now += left.pop(0)

    task = asyncio.create_task(beating.watch(hang_seconds, sleep=sleep))
    await asyncio.sleep(0.01)
    task.cancel()
    return task.done() and not task.cancelled()


async def test_hang_ends_the_watchdog_after_its_timeouts() -> None:
    clock = Clock()
    beating = heartbeat(clock)
    beating.set_stage("serving")
    assert not await watch(beating, clock, *[1.0] * 70, hang_seconds=60)
    assert not beating.health().alive
    assert await watch(beating, clock, 1.0, hang_seconds=60)


async def test_suspended_time_does_not_count_against_the_engine() -> None:
    clock = Clock()
    beating = heartbeat(clock)
    beating.set_stage("serving")
    assert not await watch(beating, clock, 76.0, 1.0, 3600.0, 1.0, hang_seconds=60)
    assert beating.health().alive


async def test_health_is_fair_before_the_watchdog_has_woken_up() -> None:
    clock = Clock()
    beating = heartbeat(clock)
    beating.set_stage("serving")
    task = asyncio.create_task(beating.watch(60))
    await asyncio.sleep(0.01)
    clock.now += 76
    assert beating.health().alive
    task.cancel()


async def test_watchdog_that_is_always_late_still_detects_a_hang() -> None:
    clock = Clock()
    beating = heartbeat(clock)
    beating.set_stage("serving")
    assert await watch(beating, clock, *[5.0] * 60, hang_seconds=60)


async def beat_once(beating: Heartbeat, processes: dict[int, str]) -> None:
    async def ping() -> None:
        pass

    task = asyncio.create_task(beating.run(ping, processes))
    await asyncio.sleep(0.01)
    task.cancel()


async def test_heartbeat_counts_only_if_every_process_runs() -> None:
    clock = Clock()
    beating = heartbeat(clock)
    beating.set_stage("serving")
    clock.now += 5
    await beat_once(beating, {os.getpid(): "this one", 2**22 + 1: "gone"})
    assert beating.health().age_seconds == 5
    await beat_once(beating, {os.getpid(): "this one"})
    assert beating.health().age_seconds == 0


async def test_zombie_process_does_not_run() -> None:
    clock = Clock()
    beating = heartbeat(clock)
    clock.now += 5
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        while _process_state(child.pid) != "Z":
            await asyncio.sleep(0.01)
        await beat_once(beating, {child.pid: "zombie"})
    assert beating.health().age_seconds == 5


def _process_state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]

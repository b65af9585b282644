"""The heartbeat's bounds, on a clock that the test moves."""

import asyncio
import os
import subprocess
import sys

from engine.heartbeat import Heartbeat


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def heart(clock: Clock) -> Heartbeat:
    return Heartbeat(bounds={"starting": 60, "serving": 10, "activating": 600}, clock=clock)


def test_each_stage_has_its_own_bound() -> None:
    clock = Clock()
    beating = heart(clock)
    for stage, bound in (("starting", 60), ("serving", 10), ("activating", 600)):
        beating.enter(stage)  # type: ignore[arg-type]
        clock.now += bound
        assert beating.pulse().alive
        clock.now += 1
        late = beating.pulse()
        assert not late.alive
        assert late.reason == f"no sign of life for {bound + 1:.1f} s"


def test_entering_a_stage_is_a_sign_of_life() -> None:
    clock = Clock()
    beating = heart(clock)
    clock.now += 1000
    beating.enter("serving")
    assert beating.pulse().age_seconds == 0


def test_death_is_final_and_keeps_its_first_reason() -> None:
    beating = heart(Clock())
    beating.died("first")
    beating.died("second")
    beating.enter("serving")
    assert (beating.pulse().stage, beating.pulse().reason) == ("dead", "first")


async def beat_once(beating: Heartbeat, processes: dict[int, str]) -> None:
    async def ping() -> None:
        pass

    task = asyncio.create_task(beating.run(ping, processes))
    await asyncio.sleep(0.01)
    task.cancel()


async def test_a_beat_counts_only_if_every_process_runs() -> None:
    clock = Clock()
    beating = heart(clock)
    beating.enter("serving")
    clock.now += 5
    await beat_once(beating, {os.getpid(): "this one", 2**22 + 1: "gone"})
    assert beating.pulse().age_seconds == 5
    await beat_once(beating, {os.getpid(): "this one"})
    assert beating.pulse().age_seconds == 0


async def test_a_zombie_does_not_run() -> None:
    clock = Clock()
    beating = heart(clock)
    clock.now += 5
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        while _state(child.pid) != "Z":
            await asyncio.sleep(0.01)
        await beat_once(beating, {child.pid: "zombie"})
    assert beating.pulse().age_seconds == 5


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]

"""The two parts of a run: which processes measure what, and when."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.gpu import timers
from bench.gpu.jobs import Job, wait_for, write_json
from bench.gpu.turns import Arm, take_turns
from bench.gpu.workloads import BATCHES

STAGGER_SECONDS: Final = 8.0
"""Imports of several processes at once take longer than one after another."""
START_SECONDS: Final = 135.0
ROUNDS: Final = 3
REHEARSAL_SECONDS: Final = 1800.0
BATCH_SECONDS: Final = 60.0
PAUSE_SECONDS, GRAPH_SECONDS = 80.0, 58.0
ARM_END_SECONDS, END_SECONDS = 14.0, 5.0
TESTS: Final = ("engine", "kv_transfer", "speculation")


@dataclass(slots=True, kw_only=True)
class Visit:
    """One call on a GPU host. `work` stays on the host between calls, `out` is brought back.

    In a rehearsal no module has a limit of its own, since a CPU may be busy.
    """

    part: str
    out: Path
    work: Path
    until: float
    rehearse: bool
    jobs: dict[str, Job] = field(default_factory=dict)

    def start(self, name: str, *arguments: str, seconds: float) -> Job:
        """Start a module; its name is also that of its log and of its timers."""
        flags = ["--rehearse"] if self.rehearse else []
        self.jobs[name] = Job.start(
            name,
            [*arguments, *flags],
            out=self.out,
            until=self.until,
            seconds=self.limit(seconds),
            environment={
                timers.VARIABLE: str(self.out / "timers" / name),
                "VLLM_LOGGING_LEVEL": "INFO",  # the report reads the log
            },
        )
        return self.jobs[name]

    def run(self, name: str, *arguments: str, seconds: float) -> None:
        """Run a module alone on the GPU, and write what has ended so far."""
        wait_for([self.start(name, *arguments, seconds=seconds)])
        self.write()

    def tests(self, name: str, seconds: float) -> Job:
        limit = str(self.limit(seconds))
        arguments = ("tests.gpu", "--out", str(self.out / "tests"), "--seconds", limit)
        file = f"tests/gpu/test_{name}.py"
        # The runner needs a moment for its report after a file's time is over.
        return self.start(f"tests-{name}", *arguments, file, seconds=seconds + END_SECONDS)

    def arm(self, mode: str, name: str, seconds: float) -> Arm:
        file = self.out / f"{name}.jsonl"
        folders = ("--models", str(self.models), "--cache", str(self.work / "cache"))
        arguments = ("bench.gpu.arm", mode, *folders, "--results", str(file))
        return Arm(mode=mode, job=self.start(name, *arguments, seconds=seconds), file=file)

    def limit(self, seconds: float) -> float:
        return REHEARSAL_SECONDS if self.rehearse else seconds

    @property
    def models(self) -> Path:
        return self.work / "models"

    def stagger(self, *jobs: Job) -> None:
        """Time between the starts of processes that then live side by side.

        A rehearsal runs them one after another: a small machine may not have memory for all.
        """
        if self.rehearse:
            wait_for(jobs)
        else:
            time.sleep(STAGGER_SECONDS)

    def write(self) -> None:
        ended = {name: job.result for name, job in self.jobs.items() if job.result}
        write_json(self.out / f"jobs-{self.part}.json", ended)


def part_a(visit: Visit) -> None:
    """Models, kernels, copies; then tests side by side with a start that compiles."""
    models = visit.start("models", "bench.gpu.models", str(visit.models), seconds=200)
    results = str(visit.out / "kernels.json"), str(visit.work / "cache")
    kernels = ("bench.gpu.kernels", "--results", results[0], "--crossover", results[1])
    visit.run("kernels", *kernels, seconds=72)
    copies = ("bench.gpu.copies", "--results", str(visit.out / "copies.json"))
    visit.run("copies", *copies, seconds=28)
    wait_for([models])
    side_by_side = []
    for name in TESTS:
        side_by_side.append(visit.tests(name, seconds=100))
        visit.stagger(side_by_side[-1])
    compiled = visit.arm("auto", "compile", seconds=95)
    compiled.job.close_input()
    wait_for([*side_by_side, compiled.job])


def part_b(visit: Visit) -> None:
    """Engines that take turns, the pause, and the tests of graphs."""
    began = time.monotonic()
    start_until = began + visit.limit(START_SECONDS)
    turns_until = visit.until - ARM_END_SECONDS - PAUSE_SECONDS - GRAPH_SECONDS - END_SECONDS
    arms = []
    for mode in BATCHES:
        left = turns_until + ARM_END_SECONDS - time.monotonic()
        arms.append(visit.arm(mode, f"arm-{mode}", seconds=left))
        # vLLM takes all memory that a capture costs the GPU for its graphs', so the first one is
        # alone. Six starts at once take too much of a small machine.
        if visit.rehearse or len(arms) == 1:
            arms[-1].wait(1, start_until)
        visit.stagger()
    take_turns(
        arms,
        rounds=1 if visit.rehearse else ROUNDS,
        start_until=start_until,
        until=turns_until,
        batch_seconds=visit.limit(BATCH_SECONDS),
    )
    for arm in arms:
        arm.job.close_input()
    wait_for(arm.job for arm in arms)
    visit.write()
    results = ("--results", str(visit.out / "pause.jsonl"))
    pause = ("bench.gpu.pause", "--models", str(visit.models), *results)
    visit.run("pause", *pause, seconds=PAUSE_SECONDS)
    wait_for([visit.tests("graphs", seconds=GRAPH_SECONDS)])


PARTS: Final[Mapping[str, Callable[[Visit], None]]] = {"a": part_a, "b": part_b}

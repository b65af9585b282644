"""Engines that live on one GPU and sample in turn, so that every comparison is paired."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu.jobs import POLL_SECONDS, Job
from bench.gpu.workloads import BATCHES


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A process of `bench.gpu.arm` and the file of its results."""

    mode: str
    job: Job
    file: Path

    def lines(self) -> int:
        return self.file.read_bytes().count(b"\n") if self.file.exists() else 0

    def wait(self, lines: int, until: float) -> None:
        """Wait for results until a time; an arm without them is stopped."""
        while self.lines() < lines and not self.job.poll():
            if time.monotonic() > until:
                self.job.stop()
            time.sleep(POLL_SECONDS)

    def run(self, batch: str, seconds: float) -> None:
        before = self.lines()
        self.job.send(batch)
        self.wait(before + 1, time.monotonic() + seconds)


def take_turns(
    arms: Sequence[Arm], *, rounds: int, start_until: float, until: float, batch_seconds: float
) -> None:
    """Run all batches in all arms, as often as the time allows; the first round is a warm-up.

    No arm takes a turn before all have started or failed: a start takes the GPU from the others.
    Every second round is in reverse, so that no arm always follows the same one.
    """
    for arm in arms:
        arm.wait(1, start_until)
    batches = list(dict.fromkeys(batch for arm in arms for batch in BATCHES[arm.mode]))
    for number in range(1 + rounds):
        for batch in batches:
            having = [arm for arm in arms if batch in BATCHES[arm.mode]]
            for arm in having if number % 2 == 0 else reversed(having):
                if time.monotonic() >= until:
                    return
                if not arm.job.poll():
                    arm.run(batch, batch_seconds)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Complete lines of a file of results; none if it was not written."""
    if not file.exists():
        return []
    *lines, _ = file.read_text().split("\n")
    return [json.loads(line) for line in lines]

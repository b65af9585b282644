"""Time measurement of the parts of a GRPO step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

PARTS = ("samples", "rewards", "gradients", "weights")


class Stopwatch:
    """Adds up the seconds spent in each part of a GRPO step; PARTS lists the parts."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - began

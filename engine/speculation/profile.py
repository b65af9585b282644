"""The short profile at the start: real steps of the engine that verify drafts of every length.

What is drafted does not matter to what it costs, so any token will do. A cell is a number of rows,
their context and a number of tokens; of each the median counts.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.speculation.cost import Step, StepCost

REPEATS = 4
MOST_TOKENS = 256
CONTEXT_CELL = 128
LEAST_SPEEDUP = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Requests that run side by side to be measured, with so many prompt tokens each."""

    running: int
    prompt: int


def batches(*, max_sequences: int, max_context_tokens: int, longest: int) -> list[Batch]:
    """Rows and contexts that occur, as far as this engine takes them."""
    room = max_context_tokens - 2 * num_tokens(longest)
    wanted = [(1, 8), (4, 8), (16, 8), (64, 8), (8, 512), (2, 2048)]
    return [
        Batch(running=running, prompt=prompt)
        for running, prompt in wanted
        if running <= max_sequences and prompt <= room
    ]


def num_tokens(longest: int) -> int:
    """That each request is asked for: a step for every length, several times over."""
    return 2 * REPEATS * len(_lengths(longest))


class Profile:
    def __init__(self, longest: int) -> None:
        self._lengths = _lengths(longest)
        self._next = 0
        self._seconds: defaultdict[tuple[int, int, int], list[float]] = defaultdict(list)

    def next_length(self, running: int) -> int:
        """Each in turn; no more than a step's share of tokens."""
        self._next += 1
        return min(self._lengths[self._next % len(self._lengths)], MOST_TOKENS // running)

    def observed(self, *, running: int, context: int, verified: int, seconds: float) -> None:
        cell = context // running // CONTEXT_CELL
        self._seconds[running, cell, verified].append(seconds)

    def steps(self) -> list[Step]:
        return [
            Step(
                running=running,
                context=round((cell + 0.5) * CONTEXT_CELL * running),
                verified=verified,
                seconds=statistics.median(seconds),
            )
            for (running, cell, verified), seconds in self._seconds.items()
            if len(seconds) >= 2
        ]


def can_pay(steps: Sequence[Step], longest: int) -> bool:
    """Whether a lone sample, all of whose drafts are accepted, would be served noticeably faster:
    less than that nothing can bring.
    """
    if not steps:
        return False
    tokens = np.arange(1, longest + 2)
    seconds = StepCost(steps).seconds(running=1, context=CONTEXT_CELL, verified=tokens)
    return bool((tokens * seconds[0] / seconds).max() >= LEAST_SPEEDUP)


def _lengths(longest: int) -> list[int]:
    return sorted({0, *(length for length in (1, 2, 4, 8) if length < longest), longest})

"""Step profile at startup: real engine steps that verify drafts of every length.

The cost does not depend on the draft tokens, so any token will do. A cell is a number of rows,
their context and a number of verified tokens; its value is the median time.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.speculation.cost import Step, StepCostModel

REPEATS = 4
MAX_STEP_TOKENS = 256
CONTEXT_BUCKET = 128
MIN_SPEEDUP = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileBatch:
    """Requests to run concurrently for a measurement, with `prompt` prompt tokens each."""

    running: int
    prompt: int


def profile_batches(
    *, max_sequences: int, max_context_tokens: int, max_draft_tokens: int
) -> list[ProfileBatch]:
    """Typical row counts and contexts within the limits of the engine."""
    room = max_context_tokens - 2 * num_tokens(max_draft_tokens)
    wanted = [(1, 8), (4, 8), (16, 8), (64, 8), (8, 512), (2, 2048)]
    return [
        ProfileBatch(running=running, prompt=prompt)
        for running, prompt in wanted
        if running <= max_sequences and prompt <= room
    ]


def num_tokens(max_draft_tokens: int) -> int:
    """Tokens to generate per request: several steps for every draft length."""
    return 2 * REPEATS * len(_lengths(max_draft_tokens))


class Profile:
    """Step times collected while the batches of the profile run."""

    def __init__(self, max_draft_tokens: int) -> None:
        self._lengths = _lengths(max_draft_tokens)
        self._next = 0
        self._seconds: defaultdict[tuple[int, int, int], list[float]] = defaultdict(list)

    def next_length(self, running: int) -> int:
        """The next draft length in rotation, limited by MAX_STEP_TOKENS per step."""
        self._next += 1
        return min(self._lengths[self._next % len(self._lengths)], MAX_STEP_TOKENS // running)

    def record_step(self, *, running: int, context: int, verified: int, seconds: float) -> None:
        cell = context // running // CONTEXT_BUCKET
        self._seconds[running, cell, verified].append(seconds)

    def steps(self) -> list[Step]:
        return [
            Step(
                running=running,
                context=round((cell + 0.5) * CONTEXT_BUCKET * running),
                verified=verified,
                seconds=statistics.median(seconds),
            )
            for (running, cell, verified), seconds in self._seconds.items()
            if len(seconds) >= 2
        ]


def can_speed_up(steps: Sequence[Step], max_draft_tokens: int) -> bool:
    """Return whether speculation can help at all.

    It can if a single sample would be MIN_SPEEDUP times faster with all drafts accepted.
    """
    if not steps:
        return False
    tokens = np.arange(1, max_draft_tokens + 2)
    seconds = StepCostModel(steps).seconds(running=1, context=CONTEXT_BUCKET, verified=tokens)
    return bool((tokens * seconds[0] / seconds).max() >= MIN_SPEEDUP)


def _lengths(max_draft_tokens: int) -> list[int]:
    return sorted(
        {0, *(length for length in (1, 2, 4, 8) if length < max_draft_tokens), max_draft_tokens}
    )

"""Model of step time as a function of running requests, total context and verified tokens.

The time is modeled as a sum of non-negative terms, so it never falls with more tokens: a constant
per call, per row, per token verified, per token of KV cache read once per row, per token of KV
cache read once per query, and a constant for steps with drafts, which are looked up, sent and
verified at a cost that does not depend on their number. The cost per verified token depends on how
many there are (a few are almost free while weights are read, many are not), so that term is
piecewise linear with breakpoints at powers of two, both convex and concave.

The model is fitted by least squares of relative errors, to a short profile at startup and to every
step since, with exponentially decaying weights. Only host clocks are read: the step's tokens have
arrived when drafts are requested, on a GPU too, so the fit adds no synchronization.
"""

import hashlib
import json
import logging
import os
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.attention.crossover import CacheKey, processor_name

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
BREAKPOINTS = np.array([2, 4, 8, 16, 32, 64, 128, 256, 512], dtype=np.float64)
NUM_TERMS = 6 + 2 * len(BREAKPOINTS)
STEP_DECAY = 0.998
"""Decay of a step's weight with each later step; the model covers about the last 500 steps."""
PROFILE_STEPS = 1.0
"""Weight of one cell of the profile, in steps.

It does not decay: the profile is all that is known about batch shapes not seen for a long time.
"""
FIT_INTERVAL = 16
RIDGE = 1e-5
DRAFTS_TERM, DRAFTS_RIDGE = 5, 1e-2
OUTLIER = 3.0
PRIOR_TOKEN_COST = 0.02
MIN_SECONDS = 1e-6
"""Lower bound of predicted times: far from the data the sum may be zero, and it is a divisor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One measured step: its decode rows, their total context in tokens, and verified tokens."""

    running: int
    context: int
    verified: int
    seconds: float


class StepCostModel:
    """Model of the step time of one engine on one machine, fitted to measured steps.

    Without a profile the cost of drafts is a prior until some are sent. `overhead` is the time of
    a step without drafts, relative to an engine without speculation.
    """

    def __init__(self, profile: Sequence[Step] = (), *, overhead: float = 1.0) -> None:
        self.overhead = overhead
        self._gram = np.zeros((NUM_TERMS, NUM_TERMS))
        self._moment = np.zeros(NUM_TERMS)
        self._fixed_gram = np.zeros_like(self._gram)
        self._fixed_moment = np.zeros_like(self._moment)
        self._costs = np.zeros(NUM_TERMS)
        self._costs[0], self._costs[2] = 1.0, PRIOR_TOKEN_COST
        self._num_steps = 0
        self.error = 0.0
        """Moving average of the relative prediction error of recent steps."""
        self._is_fitted = bool(profile)
        for step in profile:
            self._add_fixed(step, PROFILE_STEPS)
        if profile:
            self._fit()

    def seconds(self, *, running: int, context: int, verified: Ints) -> Floats:
        """Predicted times of steps that differ only in the number of verified tokens."""
        predicted = _terms(running, context, verified.astype(np.float64)) @ self._costs
        return np.maximum(predicted, MIN_SECONDS)

    def seconds_without_drafts(self, *, running: int, context: int) -> float:
        """Predicted time of a step that verifies no drafts."""
        return float(
            self.seconds(running=running, context=context, verified=np.array([running]))[0]
        )

    def record_step(self, step: Step) -> None:
        terms = _terms(step.running, step.context, np.array([float(step.verified)]))[0]
        seconds = step.seconds
        if self._is_fitted:
            predicted = max(float(terms @ self._costs), 1e-9)
            # Limits the effect of a step delayed by something else, unless there are several.
            seconds = min(max(seconds, predicted / OUTLIER), predicted * OUTLIER)
            self.error += 0.02 * (abs(seconds / predicted - 1) - self.error)
        self._num_steps += 1
        terms /= seconds
        self._gram *= STEP_DECAY
        self._gram += terms[:, None] * terms
        self._moment *= STEP_DECAY
        self._moment += terms
        if self._num_steps % FIT_INTERVAL == 0:
            if not self._is_fitted:
                self._add_prior(step)
            self._fit()
            self._is_fitted = True

    def _add_prior(self, seen: Step) -> None:
        """Add a prior for the cost of drafts, which steps without drafts do not determine."""
        for more in BREAKPOINTS:
            seconds = seen.seconds * (1 + PRIOR_TOKEN_COST * float(more))
            verified = seen.verified + int(more)
            self._add_fixed(replace(seen, verified=verified, seconds=seconds), 1.0)

    def _add_fixed(self, step: Step, weight: float) -> None:
        verified = np.array([float(step.verified)])
        terms = _terms(step.running, step.context, verified)[0] / step.seconds
        self._fixed_gram += weight * np.outer(terms, terms)
        self._fixed_moment += weight * terms

    def _fit(self) -> None:
        """Fit the costs by non-negative least squares.

        The term with the most negative cost is removed until no cost is negative.
        """
        gram, moment = self._gram + self._fixed_gram, self._moment + self._fixed_moment
        scale = np.sqrt(np.maximum(np.diag(gram), 1e-30))
        gram, moment = gram / np.outer(scale, scale), moment / scale
        gram[np.diag_indices(NUM_TERMS)] += RIDGE
        # If every step had drafts, the data do not determine their constant term: keep it minimal.
        gram[DRAFTS_TERM, DRAFTS_TERM] += DRAFTS_RIDGE
        active = np.flatnonzero(moment > 0)
        self._costs = np.zeros(NUM_TERMS)
        while len(active):
            solution = np.linalg.solve(gram[np.ix_(active, active)], moment[active])
            if solution.min() >= 0:
                self._costs[active] = solution / scale[active]
                break
            active = np.delete(active, solution.argmin())


def _terms(running: int, context: int, verified: Floats) -> Floats:
    """Terms of the step cost model, [steps, terms]; steps differ only in `verified`."""
    num_breakpoints = len(BREAKPOINTS)
    terms = np.empty((len(verified), NUM_TERMS))
    terms[:, :4] = (1.0, running, 0.0, context)
    terms[:, 2] = verified
    terms[:, 4] = verified * (context / max(running, 1))
    terms[:, DRAFTS_TERM] = verified > running
    np.minimum(verified[:, None], BREAKPOINTS, out=terms[:, 6 : 6 + num_breakpoints])
    np.maximum(verified[:, None] - BREAKPOINTS, 0.0, out=terms[:, 6 + num_breakpoints :])
    return terms


REPEATS = 4
MAX_STEP_TOKENS = 256
CONTEXT_BUCKET = 128
MIN_SPEEDUP = 1.2
"""Least speedup of a single sample with perfect drafts for which `auto` drafts at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileBatch:
    """Batch of `running` requests with `prompt` prompt tokens each, to measure step times with."""

    running: int
    prompt: int


def profile_batches(
    *, max_sequences: int, max_context_tokens: int, max_draft_tokens: int
) -> list[ProfileBatch]:
    """Batches to measure step times with, of typical sizes within the limits of the engine."""
    room = max_context_tokens - 2 * num_tokens(max_draft_tokens)
    wanted = [(1, 8), (4, 8), (16, 8), (64, 8), (8, 512), (2, 2048)]
    return [
        ProfileBatch(running=running, prompt=prompt)
        for running, prompt in wanted
        if running <= max_sequences and prompt <= room
    ]


def num_tokens(max_draft_tokens: int) -> int:
    """Number of tokens to generate per profiling request: several steps for every draft length."""
    return 2 * REPEATS * len(draft_lengths(max_draft_tokens))


class Profile:
    """Step times that are collected at startup while profiling batches run.

    The batches are real engine steps that verify drafts of every length. The cost does not depend
    on the draft tokens, so any token will do. A cell is a number of rows, their context and a
    number of verified tokens; its value is the median time.
    """

    def __init__(self, max_draft_tokens: int) -> None:
        self._lengths = draft_lengths(max_draft_tokens)
        self._next = 0
        self._seconds: defaultdict[tuple[int, int, int], list[float]] = defaultdict(list)

    def next_length(self, running: int) -> int:
        """Next draft length to measure, in rotation, limited by MAX_STEP_TOKENS per step."""
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


def best_speedup(steps: Sequence[Step], max_draft_tokens: int) -> float:
    """Speedup of a single sample with all drafts accepted, according to measured steps."""
    tokens = np.arange(1, max_draft_tokens + 2)
    seconds = StepCostModel(steps).seconds(running=1, context=CONTEXT_BUCKET, verified=tokens)
    return float((tokens * seconds[0] / seconds).max())


def draft_lengths(max_draft_tokens: int) -> list[int]:
    """Draft lengths that a profile measures, and for which CUDA graphs are captured."""
    return sorted(
        {0, *(length for length in (1, 2, 4, 8) if length < max_draft_tokens), max_draft_tokens}
    )


logger = logging.getLogger(__name__)


class ProfileCache:
    """JSON file that caches the measured step times of one engine configuration.

    Only the first start with a model measures it. The file name is a digest of all inputs that the
    times depend on. An unreadable file is measured again; a failed write costs the next start a
    measurement.
    """

    def __init__(self, directory: Path, cache_key: CacheKey) -> None:
        self._key = cache_key | {"processor_name": processor_name()}
        serialized = json.dumps(self._key, sort_keys=True).encode()
        self._file = directory / f"{hashlib.sha256(serialized).hexdigest()[:16]}.json"

    def read(self) -> list[Step] | None:
        try:
            steps = json.loads(self._file.read_text())["steps"]
            return [Step(**step) for step in steps]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, steps: Sequence[Step]) -> None:
        """Write the file atomically, as replicas that start concurrently write the same one."""
        text = json.dumps({"of": self._key, "steps": [asdict(step) for step in steps]}, indent=2)
        part = self._file.with_suffix(f".{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(text)
            part.replace(self._file)
        except OSError as error:
            logger.warning("speculation profile not cached: %s", error)

"""Controller of draft lengths per row and step: expected acceptance against modeled cost.

The expected gain of a draft token is the calibrated probability that it and all tokens before it
are accepted. The tokens of the whole batch are ordered by that probability, and the prefix of the
order that maximizes tokens per second under the cost model is sent to verification; the empty
prefix is one of the choices. The choice is optimal per step: the probability falls along each
draft, so a prefix of the order is a prefix of each draft.

Four rules bound the time that speculation loses against the same engine without drafts:

- The controller starts without drafts, until drafts that were not sent have shown their acceptance.
- Drafts are switched on only for a gain above HYSTERESIS, and off when there is no gain.
- One step in CHECK_INTERVAL is run without drafts, so that the cost without drafts is measured next
  to steps with drafts.
- If steps with drafts have lost the time of MAX_LOSS steps without, as measured (acceptance or cost
  were misjudged), drafts are paused for batches of that size (`loss_guard`). The drafts that are
  being chosen at that time are still sent.

A loss of up to ALLOWANCE, 2 % of a step, in each step with drafts never ends them: a smaller one
cannot be told from errors of measurement. Fruitless lookups and steps that measure cost time too.

The module depends on neither vLLM nor a clock: measurements arrive by `record_step` and
`record_acceptance`, so a run can be replayed. Drafts need no preparation, so switching costs
nothing in either direction.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.speculation.calibration import DraftCalibration
from engine.speculation.cost import MIN_SECONDS, Step, StepCostModel
from engine.speculation.loss_guard import LossGuards
from engine.types.feature_stats import SpeculationDecision

Floats = NDArray[np.float64]
Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]
HYSTERESIS = 1.04
CHECK_INTERVAL = 128
MIN_EXPECTED = 0.02
STEP_SIZES = ((16, 1), (32, 4), (128, 8), (1 << 30, 16))
"""(limit, multiple): a step of up to `limit` tokens must have a multiple of `multiple`.

On a CPU the first matrix product of a new size is expensive (0.5 ms per weight shape), and only few
sizes are cached.
"""
BACKOFF_AFTER, MAX_BACKOFF_STEPS = 4, 16
"""Number of fruitless evaluations before the backoff starts.

After BACKOFF_AFTER evaluations in a row that sent nothing, one step goes without evaluation before
the next, then three, and so on; one step in MAX_BACKOFF_STEPS is always evaluated.
"""
DRAINED_RATIO = 0.75
"""The backoff ends when fewer than this share of the last evaluation's requests are running."""
WINDOW = 64


class Draft(Protocol):
    """Drafts of a step: `lengths` is [rows], `probability` [rows, longest draft]."""

    @property
    def lengths(self) -> Int32Array: ...

    @property
    def probability(self) -> Float32Array: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTokens:
    """Draft tokens of a step that may be sent, from the most to the least probable.

    `positions` are those in the draft. `gains` are the expected acceptances.
    """

    rows: Int64Array
    positions: Int64Array
    gains: Floats


class Controller:
    """Chooses how many tokens of each draft are sent to verification in a step.

    There is one per engine. `decision` is the outcome for the last step's drafts. Without
    `calibration` the predicted acceptance is used as it is: drafts that are made only when they are
    sent cannot warm up a calibration.
    """

    def __init__(
        self, cost: StepCostModel | None = None, calibration: DraftCalibration | None = None
    ) -> None:
        self.cost = cost or StepCostModel()
        self.decision: SpeculationDecision = "nothing_drafted"
        self._is_active = False
        self._num_steps = 0
        self._steps_since_attempt, self._running_at_attempt = 0, 0
        self._num_fruitless = 0
        self._guards = LossGuards()
        self._all_steps = GainTracker()
        self._calibration = calibration
        self._sizes: set[int] = set()

    @property
    def gain_ratio(self) -> float:
        """Recent speedup relative to an engine without speculation.

        The estimated time without drafts in this engine, divided by the measured time and the
        overhead.
        """
        return self._all_steps.ratio / self.cost.overhead

    def should_draft(self, running: int) -> bool:
        """Decide, once per step, whether to request drafts.

        `lengths` then chooses how much is sent.
        """
        guard = self._guards.of(running)
        if guard.is_resting:
            guard.rest()
            self.decision, self._is_active = "suspended", False
            return False
        self._steps_since_attempt += 1
        backoff_steps = min(2 ** max(self._num_fruitless - BACKOFF_AFTER, 0), MAX_BACKOFF_STEPS)
        if (
            self._steps_since_attempt < backoff_steps
            and running >= DRAINED_RATIO * self._running_at_attempt
        ):
            return False
        self._steps_since_attempt, self._running_at_attempt = 0, running
        return True

    def lengths(self, drafted: Draft, *, running: int, context: int) -> Int32Array:
        """Number of tokens of each draft to send to verification in this step.

        `running` is that of `should_draft`, which alone checks whether drafts are paused.
        """
        self._num_steps += 1
        none = np.zeros(len(drafted.lengths), dtype=np.int32)
        rows, positions, predicted = _by_expected(expected_acceptance(drafted))
        if len(rows) == 0:
            self.decision = "nothing_drafted"
            self._num_fruitless += 1
            return none
        gains = predicted if self._calibration is None else self._calibration.expected(predicted)
        tokens = DraftTokens(rows=rows, positions=positions, gains=gains)
        best = self._best_lengths(tokens, len(none), running=running, context=context)
        self._is_active = bool(best.any())
        if not self._is_active:
            self.decision = "not_worth_it"
            young = self._calibration is not None and self._calibration.is_warming_up
            self._num_fruitless = 0 if young else self._num_fruitless + 1
            return none
        self._num_fruitless = 0
        if self._num_steps % CHECK_INTERVAL == 0:
            self.decision = "baseline"
            return none
        self.decision = "drafted"
        return best

    def _best_lengths(
        self, tokens: DraftTokens, num_rows: int, *, running: int, context: int
    ) -> Int32Array:
        """Draft lengths, [num_rows], that maximize tokens per second; zeros if none do."""
        num = self._best_num_tokens(tokens.gains, running=running, context=context)
        return np.bincount(tokens.rows[:num], minlength=num_rows).astype(np.int32)

    def _best_num_tokens(self, gains: NDArray[np.float64], *, running: int, context: int) -> int:
        """Number of tokens with the highest rate, among those of an allowed size of the step."""
        sizes = running + np.arange(1, len(gains) + 1)
        numbers = np.concatenate(([0], sizes[_is_allowed_size(sizes)] - running))
        emitted = running + np.concatenate(([0.0], np.cumsum(gains)))[numbers]
        seconds = self.cost.seconds(running=running, context=context, verified=running + numbers)
        return int(numbers[self._best_rate(emitted / seconds)])

    def _best_rate(self, rates: Floats) -> int:
        """Index of the highest rate, or 0, that of no drafts, unless the gain is sufficient."""
        best = int(rates.argmax())
        least = 1.0 if self._is_active else HYSTERESIS
        return best if rates[best] > least * rates[0] else 0

    def record_acceptance(self, drafted: Draft, sent: Int64Array, right: Int64Array) -> None:
        """Update the calibration with the outcome of a step's drafts.

        Of each draft `sent` tokens were verified and `right` were correct. `right` also counts
        tokens that were not sent: the token sampled after those that were sent decides one more.
        """
        if self._calibration is None:
            return
        expected, positions = expected_acceptance(drafted), np.arange(drafted.probability.shape[1])
        known = (positions <= sent[:, None]) & (expected >= MIN_EXPECTED)
        self._calibration.update(expected[known], (positions < right[:, None])[known])

    def record_step(
        self, *, running: int, context: int, verified: int, seconds: float, emitted: int
    ) -> None:
        """Record the measured time of the last step, which had only decode rows.

        The first step of each size is ignored: it does not predict later ones, and would count as a
        loss caused by drafts.
        """
        if verified not in self._sizes:
            self._sizes.add(verified)
            return
        seconds_off = self.cost.seconds_without_drafts(running=running, context=context)
        self.cost.record_step(
            Step(running=running, context=context, verified=verified, seconds=seconds)
        )
        # Fitted only to steps with drafts, the model may predict zero time for steps without.
        if seconds_off <= MIN_SECONDS:
            return
        without = seconds_off * emitted / running
        self._all_steps.add(without, seconds)
        if verified > running:
            self._guards.of(running).record((without - seconds) / seconds_off)


class GainTracker:
    """Moving averages, over WINDOW steps, of measured time and estimated time without drafts."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._without = self._with = 0.0

    def add(self, without: float, seconds: float) -> None:
        # Limits outliers, which are caused by something else: a pause, another process.
        seconds = min(seconds, 10 * without)
        self.num_steps += 1
        self._without += (without - self._without) / min(self.num_steps, WINDOW)
        self._with += (seconds - self._with) / min(self.num_steps, WINDOW)

    @property
    def ratio(self) -> float:
        return self._without / self._with if self.num_steps else 1.0


def expected_acceptance(drafted: Draft) -> NDArray[np.float64]:
    """Probability that each draft token and all tokens before it are accepted, [rows, longest]."""
    probability = drafted.probability.astype(np.float64)
    beyond = np.arange(probability.shape[1]) >= drafted.lengths[:, None]
    expected: NDArray[np.float64] = np.cumprod(np.where(beyond, 0.0, probability), axis=1)
    return expected


def _is_allowed_size(tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
    limits, steps = np.array(STEP_SIZES).T
    kept: NDArray[np.bool_] = tokens % steps[np.searchsorted(limits, tokens)] == 0
    return kept


def _by_expected(expected: Floats) -> tuple[Int64Array, Int64Array, Floats]:
    """Rows, positions and probabilities of draft tokens that may be sent, by probability."""
    rows, positions = np.nonzero(expected >= MIN_EXPECTED)
    values = expected[rows, positions]
    order = np.argsort(-values, kind="stable")
    return rows[order], positions[order], values[order]

"""How much of each draft is sent: as far as the next token is worth what verifying it costs.

A draft's token is worth the probability that it is accepted, all before it being so, as far as what
drafts promise is believed. Over the whole batch the tokens are taken in the order of that promise,
as many as give the most tokens a second by the cost model; none is one of the choices. That is the
best choice there is for a step, because a promise falls with every token, so a prefix of the order
is a prefix of each draft.

Four things are there to keep it from being worse than no drafts at all. It begins without, until
drafts that were not sent have shown what they would have brought. Drafts are taken up only for a
gain above HYSTERESIS, and left when there is none. One step in CHECKED_EVERY goes without, so
that what a step costs without drafts is measured beside steps with them. And if steps with drafts
have lost what MOST_LOST steps without take, as measured (acceptance or cost were misjudged), drafts
rest, twice as long each time.

Pure: no vLLM, no clock. What is measured comes in by `record_step` and `record_acceptance`, so it
can be replayed. Nothing has to be prepared for drafts, so a switch costs nothing in either
direction.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.protocol import SpeculationDecision
from engine.speculation.calibration import DraftCalibration
from engine.speculation.cost import MIN_SECONDS, Step, StepCostModel

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]

HYSTERESIS = 1.04
CHECK_INTERVAL = 128
MIN_EXPECTED = 0.02
STEP_SIZES = ((16, 1), (32, 4), (128, 8), (1 << 30, 16))
"""Up to so many tokens a step has a multiple of so many. On a CPU the first product of a new size
is dear (half a millisecond, for each shape of a weight), and few sizes are kept."""
BACKOFF_AFTER, MAX_BACKOFF_STEPS = 4, 32
"""After so many looks in a row that sent nothing, a step is left out before the next, then three,
and so on; one step in LOOKED_LEAST is always looked at."""
DRAINED_RATIO = 0.75
"""With so many fewer running than at the last look, what was not worth it may be."""
WINDOW = 64
MAX_LOSS = 4.0
MIN_REST_STEPS, MAX_REST_STEPS = 512, 16384


class Draft(Protocol):
    """What the controller reads of a step's drafts: [rows] and [rows, longest]."""

    @property
    def lengths(self) -> Int32Array: ...

    @property
    def probability(self) -> Float32Array: ...


class Controller:
    """One per engine. `decision` says what became of the last step's drafts. Without `calibration`
    drafts are taken to keep what they promise: those that are made only to be sent cannot earn
    it."""

    def __init__(
        self, cost: StepCostModel | None = None, calibration: DraftCalibration | None = None
    ) -> None:
        self.cost = cost or StepCostModel()
        self.decision: SpeculationDecision = "nothing_drafted"
        self._is_active = False
        self._num_steps = 0
        self._steps_since_attempt, self._running_at_attempt = 0, 0
        self._num_fruitless = 0
        self._rest = 0
        self._next_rest = MIN_REST_STEPS
        self._balance = 0.0
        self._all_steps = GainTracker()
        self._calibration = calibration
        self._sizes: set[int] = set()

    @property
    def gain_ratio(self) -> float:
        """Time that the last steps' tokens would have taken without drafts, over what they took."""
        return self._all_steps.ratio

    def should_draft(self, running: int) -> bool:
        """Once a step: whether it is worth asking for drafts, to choose their lengths then."""
        if self._rest > 0:
            self._rest -= 1
            self.decision = "resting"
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
        """How much of each draft is sent."""
        self._num_steps += 1
        none = np.zeros(len(drafted.lengths), dtype=np.int32)
        if self._rest > 0:
            self.decision = "resting"
            return none
        rows, predicted = _by_expected(expected_acceptance(drafted))
        if len(rows) == 0:
            self.decision = "nothing_drafted"
            self._num_fruitless += 1
            return none
        gains = predicted if self._calibration is None else self._calibration.expected(predicted)
        num = self._best_num_tokens(gains, running=running, context=context)
        self._is_active = num > 0
        if num == 0:
            self.decision = "not_worth_it"
            young = self._calibration is not None and self._calibration.is_warming_up
            self._num_fruitless = 0 if young else self._num_fruitless + 1
            return none
        self._num_fruitless = 0
        if self._num_steps % CHECK_INTERVAL == 0:
            self.decision = "checked"
            return none
        self.decision = "drafted"
        return np.bincount(rows[:num], minlength=len(none)).astype(np.int32)

    def _best_num_tokens(self, gains: NDArray[np.float64], *, running: int, context: int) -> int:
        tokens = running + np.arange(len(gains) + 1)
        seconds = self.cost.seconds(running=running, context=context, verified=tokens)
        rates = (running + np.concatenate(([0.0], np.cumsum(gains)))) / seconds
        rates[1:][~_is_allowed_size(tokens[1:])] = 0.0
        best = int(rates.argmax())
        least = 1.0 if self._is_active else HYSTERESIS
        return best if rates[best] > least * rates[0] else 0

    def record_acceptance(self, drafted: Draft, sent: Int64Array, right: Int64Array) -> None:
        """What came of drafts: that many tokens of each were sent, and that many were right, sent
        or not. What came after those that were sent says of one token more whether it was."""
        if self._calibration is None:
            return
        expected, places = expected_acceptance(drafted), np.arange(drafted.probability.shape[1])
        known = (places <= sent[:, None]) & (expected >= MIN_EXPECTED)
        self._calibration.update(expected[known], (places < right[:, None])[known])

    def record_step(
        self, *, running: int, context: int, verified: int, seconds: float, emitted: int
    ) -> None:
        """What the last step really cost: all its rows decoded. The first of a size says nothing of
        those to come, and would count as lost by drafts."""
        if verified not in self._sizes:
            self._sizes.add(verified)
            return
        seconds_off = self.cost.seconds_without_drafts(running=running, context=context)
        self.cost.record_step(
            Step(running=running, context=context, verified=verified, seconds=seconds)
        )
        # Fitted to steps with drafts alone, the model may say that the others take no time.
        if seconds_off <= MIN_SECONDS:
            return
        without = seconds_off * emitted / running
        self._all_steps.add(without, seconds)
        if verified > running:
            self._update_balance((without - seconds) / seconds_off)

    def _update_balance(self, gain: float) -> None:
        """`gain` in steps without drafts; what a pause took is not laid to the drafts."""
        self._balance = min(self._balance + max(gain, -MAX_LOSS / 4), MAX_LOSS)
        if self._balance < -MAX_LOSS:
            self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, MAX_REST_STEPS)
            self._is_active, self._balance = False, 0.0
        elif self._balance == MAX_LOSS:
            self._next_rest = MIN_REST_STEPS


class GainTracker:
    """Seconds without and with, over the last steps or so."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._without = self._with = 0.0

    def add(self, without: float, seconds: float) -> None:
        # Held up by something else: a pause, another program.
        seconds = min(seconds, 10 * without)
        self.num_steps += 1
        self._without += (without - self._without) / min(self.num_steps, WINDOW)
        self._with += (seconds - self._with) / min(self.num_steps, WINDOW)

    @property
    def ratio(self) -> float:
        return self._without / self._with if self.num_steps else 1.0


def expected_acceptance(drafted: Draft) -> NDArray[np.float64]:
    """[rows, longest]: the probability that a token and all before it are accepted."""
    probability = drafted.probability.astype(np.float64)
    beyond = np.arange(probability.shape[1]) >= drafted.lengths[:, None]
    expected: NDArray[np.float64] = np.cumprod(np.where(beyond, 0.0, probability), axis=1)
    return expected


def _is_allowed_size(tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
    limits, steps = np.array(STEP_SIZES).T
    kept: NDArray[np.bool_] = tokens % steps[np.searchsorted(limits, tokens)] == 0
    return kept


def _by_expected(expected: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Rows of the tokens that may be sent, the worthiest first, and their worths."""
    rows, places = np.nonzero(expected >= MIN_EXPECTED)
    values = expected[rows, places]
    order = np.argsort(-values, kind="stable")
    return rows[order], values[order]

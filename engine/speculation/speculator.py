"""One step of speculation: what the last step brought goes into the store, drafts come out of it.

Runs between two steps of the model, in the thread that takes them, on the rank whose drafts count.
The last step is timed from its drafts to these: all that a step is, the host's work too. It is left
out where it computed prompts, and where nobody was there before, for then the engine may have been
waiting for requests. All that is done per row here is done in every step: it is kept to a few
microseconds.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.speculation.batch import Batch, Sent
from engine.speculation.controller import Controller
from engine.speculation.counters import Counts
from engine.speculation.profile import Profile
from engine.speculation.request_slots import Row, Rows
from kernels.draft_index.interface import Drafted, Int32Array, Store

Lists = list[list[int]]

TIMED_EVERY = 4
CAUGHT_UP_EVERY = 32
"""While no drafts are wanted, the store hears only every so many steps what was said: seldom enough
to cost little, and often enough never to have much to hear at once."""


class Speculator:
    """`runner` is vLLM's model runner, of which its requests and its batch are read."""

    def __init__(
        self,
        runner: Any,
        store: Store,
        controller: Controller,
        counts: Counts,
        *,
        longest: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.runner = runner
        self.store = store
        self.controller = controller
        self.profile: Profile | None = None
        self._rows = Rows(store)
        self._counts = counts
        self._longest = longest
        self._clock = clock
        self._num_steps = self._unheard = 0
        self._began = 0.0
        self._sent: Sent | None = None
        self._there: set[str] = set()
        self._wanted: bool | None = None
        self._slept = (0, 0.0)

    def drafts(
        self, sampled: Sequence[Sequence[int]], lengths: Int32Array, token_ids: Int32Array
    ) -> Lists:
        """`sampled` is what each row got, nothing where its prompt is not computed to its end."""
        now = self._clock()
        ids = self.runner.input_batch.req_ids[: len(sampled)]
        if self._sent is not None or self.profile is not None or self._is_sample():
            self._look_back(ids, sampled, int(lengths[: len(ids)].sum()), now - self._began)
        self._observe_sleep(int(lengths[: len(ids)].sum()), len(ids))
        self._num_steps, self._unheard = self._num_steps + 1, self._unheard + 1
        if self._wanted is None:
            self._wanted = self._wants(len(ids))
        wanted, self._wanted, self._sent = self._wanted, None, None
        sent: Lists = [[] for _ in ids]
        if wanted or self._has_much_to_hear():
            self._unheard = 0
            self._rows.end_those_not_in(self.runner.requests, keep=self.profile is None)
            batch = self._batch(ids, sampled, lengths, token_ids)
            if batch.rows:
                self._draft(batch, ids, sent, wanted=wanted)
        if self.profile is None:
            self._counts.step(self.controller.choice)
        self._there = set(ids)
        self._began = now
        return sent

    def wakes(self, running: int) -> bool:
        """Before a step, where there is somebody to ask: whether `drafts` has to be called at its
        end: for new ones, for what became of the last, or to hear what was said."""
        self._wanted = self._wants(running)
        if self._wanted or self._sent is not None or self._has_much_to_hear(1):
            return True
        self._unheard += 1
        self._counts.step(self.controller.choice)
        self._there, self._wanted = set(), None
        return False

    def slept(self, running: int, seconds: float) -> None:
        """What a step took at whose end `drafts` was not called."""
        self._slept = running, seconds

    def end(self, ended: Iterable[str]) -> None:
        """They are about to be forgotten: the store hears the rest of what they have said."""
        if self.profile is not None:
            return
        requests = self.runner.requests
        said = [name for name in ended if name in requests and requests[name].output_token_ids]
        for name in said:
            self._row(name)  # counts those that nothing is drafted for
        self._rows.end(said, requests)

    def _has_much_to_hear(self, more: int = 0) -> bool:
        return self._unheard + more >= CAUGHT_UP_EVERY

    def _wants(self, running: int) -> bool:
        return self.profile is not None or self.controller.wants_drafts(running)

    def _observe_sleep(self, context: int, running: int) -> None:
        (slept_with, seconds), self._slept = self._slept, (0, 0.0)
        if slept_with == running and self.profile is None:
            step = {"running": running, "context": context - running, "verified": running}
            self.controller.observed(**step, seconds=seconds, emitted=running)
            self._counts.gain_ratio = self.controller.gain_ratio

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def weights_changed(self) -> None:
        """What was said so far, other weights said."""
        self.store.age()
        self._counts.weights_changed()

    def end_profile(self, controller: Controller) -> None:
        self._rows.end_those_not_in((), keep=False)
        self.profile, self.controller = None, controller
        self._sent, self._there = None, set()

    def _look_back(
        self, ids: Sequence[str], sampled: Sequence[Sequence[int]], context: int, seconds: float
    ) -> None:
        """What became of the drafts, and what the step cost."""
        computed = np.diff(self.runner.query_start_loc.np[: len(ids) + 1])
        expected = np.ones(len(ids), np.int64)
        if self._sent is not None and ids:
            numbers = self._sent.to(ids)
            expected += np.where(numbers < 0, 0, self._sent.lengths[numbers])
            self._judge(self._sent, numbers, sampled, computed - 1)
        if not (all(sampled) and ids and self._there.issuperset(ids)):
            return
        # More was computed: a prompt, or what a preempted request had lost.
        if (computed > expected).any():
            return
        step = {"running": len(ids), "context": context, "verified": int(computed.sum())}
        if self.profile is not None:
            self.profile.observed(**step, seconds=seconds)
            return
        self.controller.observed(**step, seconds=seconds, emitted=sum(map(len, sampled)))
        self._counts.gain_ratio = self.controller.gain_ratio
        self._counts.cost_error_ratio = self.controller.cost.error

    def _is_sample(self) -> bool:
        """Of steps without drafts there are so many alike that a few are enough."""
        return self.controller.choice == "checked" or self._num_steps % TIMED_EVERY == 0

    def _judge(
        self,
        of: Sent,
        numbers: NDArray[np.int64],
        sampled: Sequence[Sequence[int]],
        verified: NDArray[np.int64],
    ) -> None:
        """A draft goes on being right while what came is what it says, sent or not."""
        came = np.array([len(new) for new in sampled])
        judged = (numbers >= 0) & (came > 0)
        judged[judged] &= verified[judged] <= of.lengths[numbers[judged]]
        rows = np.flatnonzero(judged)
        if of.drafted is None or len(rows) == 0:
            return
        drafted, accepted, sent = of.drafted.rows(numbers[rows]), came[rows] - 1, verified[rows]
        last = np.array([sampled[row][-1] for row in rows.tolist()])
        next_one = np.minimum(accepted, drafted.tokens.shape[1] - 1)
        more = drafted.tokens[np.arange(len(rows)), next_one] == last
        self.controller.scored(drafted, sent, accepted + (more & (accepted < drafted.lengths)))
        self._counts.verified(drafted.scope, sent, accepted)

    def _batch(
        self,
        ids: Sequence[str],
        sampled: Sequence[Sequence[int]],
        lengths: Int32Array,
        token_ids: Int32Array,
    ) -> Batch:
        batch = Batch(places=[], rows=[], lengths=[], tokens=[])
        for place, (request_id, new) in enumerate(zip(ids, sampled, strict=True)):
            if not new:
                continue
            row, length = self._row(request_id), int(lengths[place])
            if row.slot is None:
                continue
            batch.places.append(place)
            batch.rows.append(row)
            batch.lengths.append(length)
            batch.tokens.append(token_ids[place, row.num_seen : length])
            row.num_seen = length
        return batch

    def _row(self, request_id: str) -> Row:
        known = len(self._rows)
        row = self._rows.row(request_id, self.runner.requests)
        if len(self._rows) > known and row.skip is not None:
            self._counts.skipped(row.skip)
        return row

    def _draft(self, batch: Batch, ids: Sequence[str], sent: Lists, *, wanted: bool) -> None:
        asked = wanted and self.profile is None
        limits = [
            row.limit(self._longest, length) if asked else 0
            for row, length in zip(batch.rows, batch.lengths, strict=True)
        ]
        drafted = self.store.step(
            np.array([row.slot for row in batch.rows], dtype=np.int32),
            batch.counts(),
            np.concatenate(batch.tokens).astype(np.int32, copy=False),
            np.array(limits, dtype=np.int32),
        )
        self._counts.store_bytes = self.store.num_bytes
        if self.profile is not None:
            self._draft_anything(self.profile, batch, ids, sent)
        elif asked:
            self._choose(drafted, batch, ids, sent)

    def _choose(self, drafted: Drafted, batch: Batch, ids: Sequence[str], sent: Lists) -> None:
        chosen = self.controller.lengths(
            drafted, running=len(batch.rows), context=sum(batch.lengths)
        )
        for number in np.flatnonzero(chosen).tolist():
            sent[batch.places[number]] = drafted.tokens[number, : chosen[number]].tolist()
        if drafted.lengths.any():
            self._sent = Sent(numbers=batch.numbers(ids), lengths=chosen, drafted=drafted)

    def _draft_anything(
        self, profile: Profile, batch: Batch, ids: Sequence[str], sent: Lists
    ) -> None:
        """What verifying costs does not depend on what comes of it."""
        length = min(profile.next_length(len(batch.rows)), self._longest)
        lengths = [row.limit(length, n) for row, n in zip(batch.rows, batch.lengths, strict=True)]
        for place, number in zip(batch.places, lengths, strict=True):
            sent[place] = [0] * number
        self._sent = Sent(
            numbers=batch.numbers(ids), lengths=np.array(lengths, np.int32), drafted=None
        )

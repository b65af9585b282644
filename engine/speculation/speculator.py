"""One speculation step: store the tokens of the last step, then propose drafts for the next.

It runs between two model steps, in the thread that runs them, on the rank whose drafts count. The
last step is timed from the call for its drafts to this call, which includes the host's work. A step
is not timed if it contained prefill or new requests, because the engine may have been idle before
it. The work per row runs in every step and is kept to a few microseconds.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.speculation.controller import Controller
from engine.speculation.cost import Profile
from engine.speculation.counters import Counters
from engine.speculation.request_table import Batch, RequestTable, SentDrafts, TrackedRequest
from kernels.draft_index.store_protocol import DraftBatch, Int32Array, Store

TokenLists = list[list[int]]

TIMING_INTERVAL = 4
STORE_UPDATE_INTERVAL = 32
"""Steps between updates of the store while no drafts are wanted.

Rare enough to cost little, frequent enough to keep each update small.
"""


class Speculator:
    """Connects draft store, controller and vLLM's model runner.

    `runner` is the model runner, of which the requests and the input batch are read.
    """

    def __init__(
        self,
        runner: Any,
        store: Store,
        controller: Controller,
        counts: Counters,
        *,
        max_draft_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.runner = runner
        self.store = store
        self.controller = controller
        self.profile: Profile | None = None
        self._rows = RequestTable(store)
        self._counts = counts
        self._max_draft_tokens = max_draft_tokens
        self._clock = clock
        self._num_steps = self._steps_since_store_update = 0
        self._began = 0.0
        self._sent: SentDrafts | None = None
        self._previous_ids: set[str] = set()
        self._drafts_wanted: bool | None = None
        self._skipped_step = (0, 0.0)

    def drafts(
        self, sampled: Sequence[Sequence[int]], lengths: Int32Array, token_ids: Int32Array
    ) -> TokenLists:
        """Drafts for the next step, per batch row.

        `sampled` are the tokens of the last step, none for a row whose prefill is incomplete.
        """
        now = self._clock()
        ids = self.runner.input_batch.req_ids[: len(sampled)]
        if self._sent is not None or self.profile is not None or self._should_time_step():
            self._record_last_step(ids, sampled, int(lengths[: len(ids)].sum()), now - self._began)
        self._record_skipped_step(int(lengths[: len(ids)].sum()), len(ids))
        self._num_steps, self._steps_since_store_update = (
            self._num_steps + 1,
            self._steps_since_store_update + 1,
        )
        if self._drafts_wanted is None:
            self._drafts_wanted = self._should_draft(len(ids))
        wanted, self._drafts_wanted, self._sent = self._drafts_wanted, None, None
        sent: TokenLists = [[] for _ in ids]
        if wanted or self._must_update_store():
            self._steps_since_store_update = 0
            self._rows.finish_missing(self.runner.requests, keep=self.profile is None)
            batch = self._batch(ids, sampled, lengths, token_ids)
            if batch.rows:
                self._draft(batch, ids, sent, wanted=wanted)
        if self.profile is None:
            self._counts.record_step(self.controller.decision)
        self._previous_ids = set(ids)
        self._began = now
        return sent

    def needs_draft_step(self, running: int) -> bool:
        """Return, before a step, whether `drafts` must be called at the end of the step.

        It must for new drafts, for the outcome of the last drafts, or to update the store.
        """
        self._drafts_wanted = self._should_draft(running)
        if self._drafts_wanted or self._sent is not None or self._must_update_store(1):
            return True
        self._steps_since_store_update += 1
        self._counts.record_step(self.controller.decision)
        self._previous_ids, self._drafts_wanted = set(), None
        return False

    def on_skipped_step(self, running: int, seconds: float) -> None:
        """Record the time of a step after which `drafts` was not called."""
        self._skipped_step = running, seconds

    def end(self, ended: Iterable[str]) -> None:
        """Store the remaining tokens of requests that the model runner is about to drop."""
        if self.profile is not None:
            return
        requests = self.runner.requests
        new_tokens = [
            name for name in ended if name in requests and requests[name].output_token_ids
        ]
        for name in new_tokens:
            self._row(name)  # also counts requests that are not drafted for
        self._rows.end(new_tokens, requests)

    def _must_update_store(self, more: int = 0) -> bool:
        return self._steps_since_store_update + more >= STORE_UPDATE_INTERVAL

    def _should_draft(self, running: int) -> bool:
        return self.profile is not None or self.controller.should_draft(running)

    def _record_skipped_step(self, context: int, running: int) -> None:
        (num_running, seconds), self._skipped_step = self._skipped_step, (0, 0.0)
        if num_running == running and self.profile is None:
            step = {"running": running, "context": context - running, "verified": running}
            self.controller.record_step(**step, seconds=seconds, emitted=running)
            self._counts.gain_ratio = self.controller.gain_ratio

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def on_weights_changed(self) -> None:
        """Mark all stored tokens as generated by older weights."""
        self.store.age()
        self._counts.on_weights_changed()

    def end_profile(self, controller: Controller) -> None:
        self._rows.finish_missing((), keep=False)
        self.profile, self.controller = None, controller
        self._sent, self._previous_ids = None, set()

    def _record_last_step(
        self, ids: Sequence[str], sampled: Sequence[Sequence[int]], context: int, seconds: float
    ) -> None:
        """Record the outcome of the last drafts and the cost of the last step."""
        computed = np.diff(self.runner.query_start_loc.np[: len(ids) + 1])
        expected = np.ones(len(ids), np.int64)
        if self._sent is not None and ids:
            draft_indices = self._sent.to(ids)
            expected += np.where(draft_indices < 0, 0, self._sent.lengths[draft_indices])
            self._score_drafts(self._sent, draft_indices, sampled, computed - 1)
        if not (all(sampled) and ids and self._previous_ids.issuperset(ids)):
            return
        # More tokens were computed than expected: prefill, or recomputation after a preemption.
        if (computed > expected).any():
            return
        step = {"running": len(ids), "context": context, "verified": int(computed.sum())}
        if self.profile is not None:
            self.profile.record_step(**step, seconds=seconds)
            return
        self.controller.record_step(**step, seconds=seconds, emitted=sum(map(len, sampled)))
        self._counts.gain_ratio = self.controller.gain_ratio
        self._counts.cost_error_ratio = self.controller.cost.error

    def _should_time_step(self) -> bool:
        """Return whether to time the last step.

        Steps without drafts are so alike that timing a few is sufficient.
        """
        return self.controller.decision == "baseline" or self._num_steps % TIMING_INTERVAL == 0

    def _score_drafts(
        self,
        of: SentDrafts,
        draft_indices: NDArray[np.int64],
        sampled: Sequence[Sequence[int]],
        verified: NDArray[np.int64],
    ) -> None:
        """Compare the last step's drafts with its sampled tokens, and record their acceptance.

        The first token after those that were sent also counts as correct if it equals the next
        draft token.
        """
        num_sampled = np.array([len(new) for new in sampled])
        is_scored = (draft_indices >= 0) & (num_sampled > 0)
        is_scored[is_scored] &= verified[is_scored] <= of.lengths[draft_indices[is_scored]]
        rows = np.flatnonzero(is_scored)
        if of.drafted is None or len(rows) == 0:
            return
        drafted, accepted, sent = (
            of.drafted.rows(draft_indices[rows]),
            num_sampled[rows] - 1,
            verified[rows],
        )
        last = np.array([sampled[row][-1] for row in rows.tolist()])
        next_one = np.minimum(accepted, drafted.tokens.shape[1] - 1)
        more = drafted.tokens[np.arange(len(rows)), next_one] == last
        self.controller.record_acceptance(
            drafted, sent, accepted + (more & (accepted < drafted.lengths))
        )
        self._counts.record_verified(drafted.scope, sent, accepted)

    def _batch(
        self,
        ids: Sequence[str],
        sampled: Sequence[Sequence[int]],
        lengths: Int32Array,
        token_ids: Int32Array,
    ) -> Batch:
        batch = Batch(batch_indices=[], rows=[], lengths=[], tokens=[])
        for batch_index, (request_id, new) in enumerate(zip(ids, sampled, strict=True)):
            if not new:
                continue
            row, length = self._row(request_id), int(lengths[batch_index])
            if row.slot is None:
                continue
            batch.batch_indices.append(batch_index)
            batch.rows.append(row)
            batch.lengths.append(length)
            batch.tokens.append(token_ids[batch_index, row.num_stored : length])
            row.num_stored = length
        return batch

    def _row(self, request_id: str) -> TrackedRequest:
        known = len(self._rows)
        row = self._rows.row(request_id, self.runner.requests)
        if len(self._rows) > known and row.skip_reason is not None:
            self._counts.record_skipped(row.skip_reason)
        return row

    def _draft(self, batch: Batch, ids: Sequence[str], sent: TokenLists, *, wanted: bool) -> None:
        needs_drafts = wanted and self.profile is None
        limits = [
            row.limit(self._max_draft_tokens, length) if needs_drafts else 0
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
            self._draft_for_profile(self.profile, batch, ids, sent)
        elif needs_drafts:
            self._choose(drafted, batch, ids, sent)

    def _choose(
        self, drafted: DraftBatch, batch: Batch, ids: Sequence[str], sent: TokenLists
    ) -> None:
        chosen = self.controller.lengths(
            drafted, running=len(batch.rows), context=sum(batch.lengths)
        )
        for number in np.flatnonzero(chosen).tolist():
            sent[batch.batch_indices[number]] = drafted.tokens[number, : chosen[number]].tolist()
        if drafted.lengths.any():
            self._sent = SentDrafts(
                draft_indices=batch.draft_indices(ids), lengths=chosen, drafted=drafted
            )

    def _draft_for_profile(
        self, profile: Profile, batch: Batch, ids: Sequence[str], sent: TokenLists
    ) -> None:
        """Send zeros as drafts: the verification cost does not depend on acceptance."""
        length = min(profile.next_length(len(batch.rows)), self._max_draft_tokens)
        lengths = [row.limit(length, n) for row, n in zip(batch.rows, batch.lengths, strict=True)]
        for batch_index, number in zip(batch.batch_indices, lengths, strict=True):
            sent[batch_index] = [0] * number
        self._sent = SentDrafts(
            draft_indices=batch.draft_indices(ids),
            lengths=np.array(lengths, np.int32),
            drafted=None,
        )

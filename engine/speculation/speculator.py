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

from engine.speculation.controller import Controller
from engine.speculation.cost import Profile
from engine.speculation.counters import Counters
from engine.speculation.drafting import Drafting
from engine.speculation.request_table import Batch, SentDrafts
from kernels.draft_index.store_protocol import DraftBatch, Int32Array, Store

TokenLists = list[list[int]]


class Speculator(Drafting):
    """Connects draft store and controller to vLLM's Model Runner V1.

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
        super().__init__(
            runner.requests,
            store,
            controller,
            counts,
            max_draft_tokens=max_draft_tokens,
            clock=clock,
        )
        self.runner = runner
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
        self._num_steps += 1
        self._steps_since_store_update += 1
        if self._drafts_wanted is None:
            self._drafts_wanted = self._should_draft(len(ids))
        wanted, self._drafts_wanted, self._sent = self._drafts_wanted, None, None
        sent: TokenLists = [[] for _ in ids]
        if wanted or self._must_update_store():
            self._steps_since_store_update = 0
            self._rows.finish_missing(self._requests, keep=self.profile is None)
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
        self._end_requests(ended, self._requests)

    def _record_skipped_step(self, context: int, running: int) -> None:
        (num_running, seconds), self._skipped_step = self._skipped_step, (0, 0.0)
        if num_running == running and self.profile is None:
            step = {"running": running, "context": context - running, "verified": running}
            self._record_step(**step, seconds=seconds, emitted=running)

    def end_profile(self, controller: Controller) -> None:
        super().end_profile(controller)
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
        self._record_step(
            running=len(ids),
            context=context,
            verified=int(computed.sum()),
            seconds=seconds,
            emitted=sum(map(len, sampled)),
        )

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

    def _draft(self, batch: Batch, ids: Sequence[str], sent: TokenLists, *, wanted: bool) -> None:
        needs_drafts = wanted and self.profile is None
        drafted = self._update_store(batch, self._max_draft_tokens if needs_drafts else 0)
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

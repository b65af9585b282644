"""One speculation step: store the tokens of the last step, then propose drafts for the next.

It runs between two model steps, in the thread that runs them, on the rank whose drafts count.
Drafts are first looked up before a step. Only if they are worth sending does that step run with
vLLM's draft method, which requests drafts at its end. In models with recurrent layers all steps do.

The last step is timed from the call for its drafts to this call, which includes the host's work. A
step is not timed if it contained prefill or new requests, because the engine may have been idle
before it.
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np

from engine.speculation.controller import Controller
from engine.speculation.cost import Profile
from engine.speculation.counters import Counters
from engine.speculation.drafting import Drafting
from engine.speculation.request_table import Batch, NewTokens, SentDrafts
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
        self._has_looked_up = False
        self._skipped_step = (0, 0.0)

    def drafts(
        self, sampled: Sequence[Sequence[int]], lengths: Int32Array, token_ids: Int32Array
    ) -> TokenLists:
        """Drafts for the next step, per batch row.

        `sampled` are the tokens of the last step, none for a row whose prefill is incomplete.
        """
        now = self._clock()
        ids = self.runner.input_batch.req_ids[: len(sampled)]
        context = int(lengths[: len(ids)].sum())
        if self._sent is not None or self.profile is not None or self._should_time_step():
            self._record_last_step(ids, sampled, context, now - self._began)
        self._record_skipped_step(context - len(ids), len(ids))
        self._num_steps += 1
        self._steps_since_store_update += 1
        if self._drafts_wanted is None:
            self._drafts_wanted = self._should_draft(len(ids))
        wanted, self._drafts_wanted, self._sent = self._drafts_wanted, None, None
        self._has_looked_up = False
        sent: TokenLists = [[] for _ in ids]
        if wanted or self._must_update_store():
            rows = [index for index, new in enumerate(sampled) if new]
            batch = self._batch(ids, rows, lengths)
            if batch.rows:
                self._draft(batch, ids, token_ids, sent, context=context, wanted=wanted)
        if self.profile is None:
            self._counts.record_step(self.controller.decision)
        self._previous_ids = set(ids)
        self._began = now
        return sent

    def needs_draft_step(self, scheduled: Collection[str]) -> bool:
        """Return, before a step, whether `drafts` must be called at the end of the step.

        It must if the step verifies drafts, or if new drafts are worth sending, as far as the
        tokens before the step show. They are looked up here without vLLM's draft method: a step
        with the draft method costs more than the lookup, and most lookups send nothing.
        """
        wanted = self._should_draft(len(scheduled))
        if self.profile is not None or (self._sent is not None and self._sent.lengths.any()):
            self._drafts_wanted = wanted
            return True
        wanted = self._look_up_if_new(scheduled, wanted=wanted)
        self._drafts_wanted = wanted or None
        if not wanted:
            self._steps_since_store_update += 1
            self._counts.record_step(self.controller.decision)
            self._previous_ids = set()
        return wanted

    def on_skipped_step(self, running: int, seconds: float) -> None:
        """Record the time of a step after which `drafts` was not called."""
        self._skipped_step = running, seconds

    def end(self, ended: Iterable[str]) -> None:
        """Store the remaining tokens of requests that the model runner is about to drop."""
        self._end_requests(ended, self._requests)

    def _record_skipped_step(self, context: int, running: int) -> None:
        """Record the cost of the last skipped step; `context` is that after the step."""
        (num_running, seconds), self._skipped_step = self._skipped_step, (0, 0.0)
        if num_running == running and self.profile is None:
            step = {"running": running, "context": context, "verified": running}
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
            self._score_drafts(
                self._sent, draft_indices, NewTokens.of(sampled), computed.astype(np.int64) - 1
            )
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

    # Lookup before a step, in the tokens of the runner's batch.

    def _look_up_if_new(self, scheduled: Collection[str], *, wanted: bool) -> bool:
        """If `wanted`, return whether drafts are worth sending, as far as is known before a step.

        No token has arrived since a lookup at the end of the last step, which has sent none. Only
        if it has measured the cost without drafts were they worth sending.
        """
        if self._has_looked_up:
            self._has_looked_up = False
            return wanted and self.controller.decision == "baseline"
        self._score_unsent()
        if wanted or self._must_update_store(1):
            return self._look_up(scheduled, wanted=wanted)
        return False

    def _look_up(self, scheduled: Collection[str], *, wanted: bool) -> bool:
        """Store the tokens before a step; if `wanted`, return whether drafts are worth sending."""
        inputs = self.runner.input_batch
        ids, lengths = inputs.req_ids, inputs.num_tokens_no_spec
        rows = [
            index
            for index, request_id in enumerate(ids)
            if request_id in scheduled and self._requests[request_id].output_token_ids
        ]
        batch = self._batch(ids, rows, lengths)
        if not batch.rows:
            return False
        context = int(lengths[rows].sum())
        self._record_skipped_step(context, len(rows))
        drafted = self._store_tokens(
            batch, inputs.token_ids_cpu, self._max_draft_tokens if wanted else 0
        )
        if not wanted:
            return False
        chosen = self.controller.lengths(drafted, running=len(scheduled), context=context)
        self._sent = self._sent_drafts(drafted, np.zeros_like(chosen), batch, ids)
        return bool(chosen.any())

    def _score_unsent(self) -> None:
        """Compare drafts that were not sent with the tokens of the last step."""
        unsent, self._sent = self._sent, None
        if unsent is None:
            return
        inputs = self.runner.input_batch
        draft_indices = unsent.to(inputs.req_ids)
        rows = np.arange(len(draft_indices))
        lengths = inputs.num_tokens_no_spec[rows]
        has_token = (draft_indices >= 0) & (lengths == unsent.num_tokens[draft_indices] + 1)
        new_tokens = NewTokens(
            counts=has_token.astype(np.int64), last=inputs.token_ids_cpu[rows, lengths - 1]
        )
        self._score_drafts(unsent, draft_indices, new_tokens, np.zeros(len(rows), np.int64))

    def _sent_drafts(
        self, drafted: DraftBatch, lengths: Int32Array, batch: Batch, ids: Sequence[str]
    ) -> SentDrafts | None:
        if not drafted.lengths.any():
            return None
        return SentDrafts(
            draft_indices=batch.draft_indices(ids),
            num_tokens=batch.lengths,
            lengths=lengths,
            drafted=drafted,
        )

    def _batch(self, ids: Sequence[str], rows: Sequence[int], lengths: Int32Array) -> Batch:
        self._steps_since_store_update = 0
        self._rows.finish_missing(self._requests, keep=self.profile is None)
        return Batch.of({index: self._row(ids[index]) for index in rows}, lengths)

    def _store_tokens(
        self, batch: Batch, token_ids: Int32Array, max_draft_tokens: int
    ) -> DraftBatch:
        """Store the new tokens of a batch, and look up drafts."""
        starts, counts = batch.store()
        columns = starts[:, None] + np.arange(counts.max())
        rows = np.array(batch.batch_indices)[:, None]
        tokens = token_ids[rows, np.minimum(columns, token_ids.shape[1] - 1)]
        tokens = tokens[columns < batch.lengths[:, None]]
        return self._update_store(batch, counts, tokens, max_draft_tokens)

    def _draft(
        self,
        batch: Batch,
        ids: Sequence[str],
        token_ids: Int32Array,
        sent: TokenLists,
        *,
        context: int,
        wanted: bool,
    ) -> None:
        needs_drafts = wanted and self.profile is None
        drafted = self._store_tokens(
            batch, token_ids, self._max_draft_tokens if needs_drafts else 0
        )
        if self.profile is not None:
            self._draft_for_profile(self.profile, batch, ids, sent)
        elif needs_drafts:
            self._choose(drafted, batch, ids, sent, context)

    def _choose(
        self,
        drafted: DraftBatch,
        batch: Batch,
        ids: Sequence[str],
        sent: TokenLists,
        context: int,
    ) -> None:
        chosen = self.controller.lengths(drafted, running=len(ids), context=context)
        self._has_looked_up = True
        for number in np.flatnonzero(chosen).tolist():
            sent[batch.batch_indices[number]] = drafted.tokens[number, : chosen[number]].tolist()
        self._sent = self._sent_drafts(drafted, chosen, batch, ids)

    def _draft_for_profile(
        self, profile: Profile, batch: Batch, ids: Sequence[str], sent: TokenLists
    ) -> None:
        """Send zeros as drafts: the verification cost does not depend on acceptance."""
        length = min(profile.next_length(len(batch.rows)), self._max_draft_tokens)
        lengths = batch.limits(length)
        for batch_index, number in zip(batch.batch_indices, lengths.tolist(), strict=True):
            sent[batch_index] = [0] * number
        self._sent = SentDrafts(
            draft_indices=batch.draft_indices(ids),
            num_tokens=batch.lengths,
            lengths=lengths,
            drafted=None,
        )

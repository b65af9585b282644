"""Draft lookup in a CPU worker (Model Runner V1): stores a step's tokens, proposes drafts.

It runs after every step, in the thread that runs the steps, on the rank whose drafts count. A step
that verified drafts requests the next ones as vLLM's draft method; after other steps
`DraftStepSkipper` does. In models with recurrent layers all steps use vLLM's draft method.

A step is timed from one call to the next, which includes the host's work. It is not timed if it
contained prefill or new requests, because the engine may have been idle before it.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from engine.speculation.controller import Controller
from engine.speculation.cost import Profile
from engine.speculation.counters import Counters
from engine.speculation.drafting_base import Drafting
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
        self._num_steps += 1
        self._steps_since_store_update += 1
        wanted, self._sent = self._should_draft(len(ids)), None
        sent: TokenLists = [[] for _ in ids]
        if wanted or self._must_update_store():
            batch = self._batch(ids, sampled, lengths)
            if batch.rows:
                self._draft(batch, ids, token_ids, sent, context=context, wanted=wanted)
        if self.profile is None:
            self._counts.record_step(self.controller.decision)
        self._previous_ids = set(ids)
        self._began = now
        return sent

    def end(self, ended: Iterable[str]) -> None:
        """Store the remaining tokens of requests that the model runner is about to drop."""
        self._end_requests(ended, self._requests)

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

    def _sent_drafts(
        self, drafted: DraftBatch, lengths: Int32Array, batch: Batch, ids: Sequence[str]
    ) -> SentDrafts | None:
        if not drafted.lengths.any():
            return None
        return SentDrafts(
            draft_indices=batch.draft_indices(ids),
            lengths=lengths,
            drafted=drafted,
        )

    def _batch(
        self, ids: Sequence[str], sampled: Sequence[Sequence[int]], lengths: Int32Array
    ) -> Batch:
        self._steps_since_store_update = 0
        self._rows.finish_missing(self._requests, keep=self.profile is None)
        rows = {index: self._row(ids[index]) for index, new in enumerate(sampled) if new}
        for index, row in rows.items():
            row.end_at_stop(sampled[index], int(lengths[index]))
        return Batch.of(rows, lengths)

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
            lengths=lengths,
            drafted=None,
        )

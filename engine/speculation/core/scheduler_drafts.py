"""Hooks in vLLM's scheduler (EngineCore, GPU): draft lookup during the previous step.

With asynchronous scheduling vLLM schedules step t + 2 when the tokens of step t have arrived on the
host, while step t + 1 is running. Here drafts are looked up at that time, from the tokens up to
step t, and sent with the output of the scheduler for step t + 2. The worker realigns them after the
tokens of step t + 1 (`gpu_speculator`). So the host never waits for a step to look drafts up.

All rows of a step get drafts of one length, because vLLM's full CUDA graphs have one number of
query tokens per row. Without asynchronous scheduling no step is running, and nothing is realigned.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from engine.runtime.feature_guard import feature
from engine.speculation.controller import Controller
from engine.speculation.core.scheduled_step import (
    Lookup,
    ScheduledStep,
    decodes,
    sampled_tokens,
)
from engine.speculation.core.uniform_length import longest_length
from engine.speculation.counters import Counters
from engine.speculation.draft_message import ATTRIBUTE, LateDrafts, after_step, lookup_length
from engine.speculation.drafting_base import Drafting
from engine.speculation.request_table import Batch, NewTokens, SentDrafts, TrackedRequest
from kernels.draft_index.store_protocol import DraftBatch, Store

FEATURE: Final = feature("speculation")


def _no_step(*_: Any) -> ScheduledStep | None:
    return None


class SchedulerDrafts(Drafting):
    """Connects draft store and controller to vLLM's scheduler; `attach` wraps its methods.

    `max_samples` maps each draft length to the number of rows that may use it.
    """

    def __init__(
        self,
        scheduler: Any,
        store: Store,
        controller: Controller,
        counts: Counters,
        *,
        max_draft_tokens: int,
        max_samples: Mapping[int, int],
        weights: Callable[[], str],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(
            scheduler.requests,
            store,
            controller,
            counts,
            max_draft_tokens=max_draft_tokens,
            clock=clock,
        )
        self.scheduler = scheduler
        self.is_enabled = True
        self._max_samples = max_samples
        self._weights = weights
        self._last_weights = weights()
        self._steps: deque[ScheduledStep] = deque()
        self._latest_step: ScheduledStep | None = None
        self._last_arrival = 0.0
        self._lookup: Lookup | None = None

    def attach(self) -> None:
        """Wrap the scheduler's methods. From then on its own table never makes it draft."""
        schedule, update = self.scheduler.schedule, self.scheduler.update_from_output

        def patched_schedule(*args: Any, **named: Any) -> Any:
            self.before_schedule()
            output = schedule(*args, **named)
            self.after_schedule(output)
            return output

        def patched_update(scheduler_output: Any, model_runner_output: Any) -> Any:
            step = self.on_output(scheduler_output, model_runner_output)
            outputs = update(scheduler_output, model_runner_output)
            self.end_finished(step)
            return outputs

        self.scheduler.schedule = patched_schedule
        self.scheduler.update_from_output = patched_update
        lookup = self.scheduler.dynamic_sd_lookup
        lookup[:] = [0] * len(lookup)

    # Called by vLLM in every step.

    def _on_failure(self) -> None:
        self._counts.record_skipped("failed")

    @FEATURE.guarded(_on_failure)
    def before_schedule(self) -> None:
        """Choose the drafts of the next step, and reserve their positions in it."""
        self._lookup = None
        self._detect_new_weights()
        self._reserve(self.scheduler.running, 0)  # a paused scheduler keeps what was reserved
        if not self.is_enabled:
            return
        rows = [request for request in self.scheduler.running if decodes(request)]
        if not rows:
            return
        self._num_steps += 1
        self._steps_since_store_update += 1
        wanted = self._should_draft(len(rows))
        if wanted or self._must_update_store():
            self._steps_since_store_update = 0
            self._draft(rows, wanted=wanted)
        if self.profile is None:
            self._counts.record_step(self.controller.decision)

    @FEATURE.guarded_with_default(None)
    def after_schedule(self, output: Any) -> None:
        """Record the scheduled step, and attach its drafts to vLLM's SchedulerOutput."""
        if not self.is_enabled:
            return
        drafts = output.scheduled_spec_decode_tokens
        if self._lookup is not None and drafts:
            setattr(output, ATTRIBUTE, self._lookup.late)
        scheduled = output.num_scheduled_tokens
        requests = {name: self._requests[name] for name in scheduled}
        is_timeable = all(
            request.num_output_tokens > 0 and scheduled[name] == 1 + len(drafts.get(name, ()))
            for name, request in requests.items()
        )
        self._latest_step = ScheduledStep(
            output=output,
            began=self._clock(),
            context=sum(request.num_tokens for request in requests.values()),
            is_timeable=bool(requests) and is_timeable,
            lookup=self._lookup,
            requests=requests,
        )
        self._steps.append(self._latest_step)

    @FEATURE.guarded(_no_step)
    def on_output(self, scheduler_output: Any, model_runner_output: Any) -> ScheduledStep | None:
        """Record the outcome of a step, before vLLM appends its tokens to the requests.

        The GPU runs one step after the other, so a step that was scheduled before the one before it
        had finished took the time between their outputs.
        """
        step = self._pop_step(scheduler_output)
        if step is None:
            return None
        sampled = sampled_tokens(model_runner_output)
        if not sampled:
            return step
        now = self._clock()
        began, self._last_arrival = max(self._last_arrival, step.began), now
        if step.lookup is not None:
            self._score(step, step.lookup, sampled)
        is_timed = step.lookup is not None or self.profile is not None or self._should_time_step()
        if is_timed and step.is_timeable and all(sampled.values()):
            self._record_step(
                running=len(sampled),
                context=step.context,
                verified=scheduler_output.total_num_scheduled_tokens,
                seconds=now - began,
                emitted=sum(map(len, sampled.values())),
            )
        return step

    @FEATURE.guarded_with_default(None)
    def end_finished(self, step: ScheduledStep | None) -> None:
        """Store the remaining tokens of requests that finished with a step."""
        if step is not None:
            self._end_missing(step)

    def _end_missing(self, step: ScheduledStep) -> None:
        """End the requests of a step that vLLM has dropped, in later steps too."""
        ended = {name: each for name, each in step.requests.items() if name not in self._requests}
        self._end_requests(ended, ended)
        for running in (step, *self._steps):
            for name in ended.keys() & running.requests.keys():
                del running.requests[name]

    def _pop_step(self, scheduler_output: Any) -> ScheduledStep | None:
        while self._steps:
            step = self._steps.popleft()
            if step.output is scheduler_output:
                return step
        return None

    def _detect_new_weights(self) -> None:
        if (weights := self._weights()) != self._last_weights:
            self._last_weights = weights
            self.on_weights_changed()

    # Choice of a step's drafts.

    def _draft(self, requests: Sequence[Any], *, wanted: bool) -> None:
        """Store the tokens that have arrived; if `wanted`, choose drafts for the next step."""
        if self._latest_step is not None:
            self._end_missing(self._latest_step)
        self._rows.finish_missing(self._requests, keep=self.profile is None)
        batch = self._batch(requests)
        if not batch.rows:
            return
        needs_drafts = wanted and self.profile is None
        width = lookup_length(self._max_draft_tokens) if needs_drafts else 0
        drafted = self._store_tokens(batch, requests, width)
        rows = [number for number, row in enumerate(batch.rows) if row.skip_reason is None]
        if not wanted or not rows:
            return
        chosen = [requests[batch.batch_indices[number]] for number in rows]
        if self.profile is not None:
            length = self.profile.next_length(len(requests))
            self._reserve(chosen, longest_length(self._max_samples, len(requests), length))
        else:
            self._choose(drafted.rows(np.array(rows)), chosen, running=len(requests))

    def _batch(self, requests: Sequence[Any]) -> Batch:
        rows = {index: self._tracked(request) for index, request in enumerate(requests)}
        lengths = [request.num_tokens for request in requests]
        return Batch.of(rows, np.array(lengths, np.int32))

    def _store_tokens(self, batch: Batch, requests: Sequence[Any], width: int) -> DraftBatch:
        """Store the new tokens of a batch, and look up drafts of up to `width` tokens."""
        starts, counts = batch.store()
        rows = zip(batch.batch_indices, starts.tolist(), strict=True)
        new = [np.array(requests[row].all_token_ids[start:], np.int32) for row, start in rows]
        return self._update_store(batch, counts, np.concatenate(new), width)

    def _tracked(self, request: Any) -> TrackedRequest:
        """Entry of a request. With a grammar it gets no drafts.

        vLLM validates drafts against the grammar before they are verified, and waits for them.
        """
        known = len(self._rows)
        row = self._row(request.request_id)
        is_new = len(self._rows) > known
        if is_new and row.skip_reason is None and request.use_structured_output:
            row.skip_reason = "disabled"
            self._counts.record_skipped(row.skip_reason)
        return row

    def _choose(self, drafted: DraftBatch, requests: Sequence[Any], *, running: int) -> None:
        num_new = np.array([self._num_expected(*each) for each in _drafts(requests, drafted)])
        expected = after_step(drafted, num_new, self._max_draft_tokens)
        context = sum(request.num_tokens for request in requests)
        lengths = self.controller.lengths(expected, running=running, context=context)
        late = LateDrafts(
            rows={request.request_id: row for row, request in enumerate(requests)},
            num_tokens=np.array([request.num_tokens for request in requests], np.int32),
            lengths=drafted.lengths,
            tokens=drafted.tokens,
        )
        self._lookup = Lookup(late=late, expected=expected, num_new=num_new)
        self._reserve(requests, int(lengths.max()))

    def _reserve(self, requests: Sequence[Any], length: int) -> None:
        """Make vLLM schedule that many draft positions, with placeholders as its own drafts have.

        A request that is preempted or finishes before it is scheduled loses them.
        """
        placeholders = [-1] * length
        for request in requests:
            request.spec_token_ids = placeholders

    def _num_expected(self, request: Any, draft: list[int]) -> int:
        """Number of tokens that the step in progress generates if a new draft is right."""
        return self._steps[-1].num_expected(request, draft) if self._steps else 0

    # Outcome of a step's drafts.

    def _score(self, step: ScheduledStep, lookup: Lookup, sampled: dict[str, list[int]]) -> None:
        """Record which tokens of a step's drafts were right, whether they were sent or not.

        A draft that was dropped because the step before generated other tokens counts as sent and
        rejected: its positions were verified. A draft that could be realigned although other
        tokens were expected in between is left out.
        """
        ids = [name for name in step.requests if name in lookup.late.rows]
        rows = np.array([lookup.late.rows[name] for name in ids], np.int64)
        verified = np.array([step.num_drafts(name) for name in ids], np.int64)
        verified = np.minimum(verified, lookup.expected.lengths[rows])
        outcomes = [
            lookup.outcome(self._requests.get(name), sampled.get(name, []), int(number))
            for name, number in zip(ids, verified, strict=True)
        ]
        sent = SentDrafts(
            draft_indices=lookup.late.rows,
            lengths=lookup.expected.lengths,
            drafted=lookup.expected,
        )
        self._score_drafts(sent, rows, NewTokens.of(outcomes), verified)


def _drafts(requests: Sequence[Any], drafted: DraftBatch) -> Iterator[tuple[Any, list[int]]]:
    for request, tokens, length in zip(
        requests, drafted.tokens.tolist(), drafted.lengths.tolist(), strict=True
    ):
        yield request, tokens[:length]

"""Execution of a group, i.e. one prompt and its n samples, from submission to the answer.

Every submitted group ends exactly once, and none of its samples outlives it in the engine: `run`
aborts the remaining samples on every exit. `run` awaits the submission, the samples and that abort;
cancelling it at any of these points ends the samples.
"""

import asyncio
import uuid
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from coppice.wire.columns.logprobs import PromptLogprobs
from coppice.wire.columns.token_columns import TokenColumns, TokenLists
from coppice.wire.columns.versions import cut_spans
from coppice.wire.rollouts import (
    FinishReason,
    GroupAnswer,
    Outcome,
    SampleAnswer,
    SegmentAnswer,
)
from engine.protocol.generation import Generation
from engine.types.kv import KvLoad
from engine.types.samples import Completion, SampleRequest, TokenDelta, TopLogprobs
from service.kv.handles.group_exports import GroupKvExports
from service.kv.prompt_source import PromptSource
from service.rollouts import sample_answer
from service.rollouts.fairness import Turns
from service.rollouts.finish_policy import FinishPolicy
from service.rollouts.group_options import GroupOptions, given_tokens, num_given, sample_seed
from service.rollouts.sample_answer import num_valid_tokens, valid_end, wire_spans

EndReason = Literal["cancelled", "deadline", "surplus", "version_changed", "suspended"]
OnSampleTokens = Callable[[int, TokenLists], None]
"""Receives the index of a running sample and its new tokens."""
OnPart = Callable[[SampleAnswer | SegmentAnswer], None]


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """One prompt and its samples: submits them to the engine and collects the answer.

    Owned by its rollout. `source` provides the prompt's KV. `end_reason` is the reason for which
    the running samples are being aborted, if they are. `finish_policy` decides when enough samples
    have finished by themselves. If KV `exports` were requested, the first engine request carries
    the export slot of the prompt. `name` is the globally unique id by which the engine recognizes
    the samples as siblings. `sample_seconds` are the durations of the samples since `began_at`
    (event loop clock), in the order in which they finished. `seconds_before` is the time that had
    passed when the group was resumed. `turns`, shared by the rollout, spread
    the answers of samples that finish at the same time over iterations of the event loop.
    `top_logprobs` maps a sample's index to the top logprobs of its tokens, if they were requested
    and are not part of its answer.
    `cached_tokens` maps the index of a finished sample to the number of prompt tokens that it found
    cached.
    `ended` are the answers of the finished samples, in the order in which they finished.
    `suspended` are the tokens of the others so far, by index, if the group was suspended.
    `on_tokens` receives the tokens of the running samples.
    """

    options: GroupOptions
    source: PromptSource = field(default_factory=PromptSource)
    finish_policy: FinishPolicy | None = None
    exports: GroupKvExports | None = None
    end_reason: EndReason | None = None
    num_done: int = 0
    sample_ids: list[str] = field(default_factory=list)
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    began_at: float = 0.0
    seconds_before: float = 0.0
    sample_seconds: list[float] = field(default_factory=list)
    top_logprobs: dict[int, Sequence[TopLogprobs]] = field(default_factory=dict)
    cached_tokens: dict[int, int] = field(default_factory=dict)
    turns: Turns = field(default_factory=Turns)
    ended: list[SampleAnswer] = field(default_factory=list)
    suspended: dict[int, TokenLists] = field(default_factory=dict)
    on_tokens: OnSampleTokens | None = None
    prompt_logprobs: PromptLogprobs | None = None
    _unfinished: set[str] = field(default_factory=set)
    _ending: asyncio.Event = field(default_factory=asyncio.Event)
    seconds_used: float = 0.0
    _aborted: dict[int, Completion] = field(default_factory=dict)
    _num_streamed: Counter[int] = field(default_factory=Counter)

    @property
    def num_running(self) -> int:
        return len(self._unfinished)

    def running_indices(self) -> Iterator[int]:
        """Indices of the samples that are running, in ascending order."""
        return (i for i, sample_id in enumerate(self.sample_ids) if sample_id in self._unfinished)

    def prior_spans(self, index: int) -> list[tuple[str, int]]:
        """Weights versions and numbers of the tokens that a resumed sample already has."""
        continued = self.options.continued[index : index + 1]
        return [
            (span.version, span.end - span.start) for given in continued for span in given.versions
        ]

    @property
    def is_idle(self) -> bool:
        """True if the group makes no progress until its caller sends another request."""
        return False

    async def run(self, engine: Generation, done: OnPart) -> GroupAnswer | None:
        """Run the samples and return the answer; None if the group was suspended."""
        self.sample_ids = [uuid.uuid4().hex for _ in range(self.options.n)]
        is_settled = False
        try:
            async with self._deadline(engine):
                load = await self.source.prepare(engine, self)
            await self._run_samples(engine, load, done)
            if self.suspended:
                return None
            answer = self._answer(sorted(self.ended, key=lambda sample: sample.index))
            is_settled = all(s.finish_reason in ("stop", "length") for s in answer.samples)
            return self.source.annotated(answer)
        finally:
            try:
                await self.abort_requests(engine)
            finally:
                self.source.release(settled=is_settled)

    async def end(self, engine: Generation, end_reason: EndReason) -> None:
        """Abort the running samples of the group; the tokens generated so far are in the answer."""
        if self.end_reason in (None, "suspended"):
            self.end_reason = end_reason
        self._ending.set()
        await engine.abort(list(self._unfinished))

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the samples began, also on another replica."""
        if not self.began_at:
            return self.seconds_before
        return asyncio.get_running_loop().time() - self.began_at

    @property
    def ends(self) -> bool:
        return self.end_reason is not None

    async def wait_for_end(self) -> None:
        await self._ending.wait()

    def on_submitted(self, request_id: str) -> None:
        self._unfinished.add(request_id)

    def on_finished(self, request_id: str) -> None:
        self._unfinished.discard(request_id)

    async def abort_requests(self, engine: Generation) -> None:
        await engine.abort(list(self._unfinished))
        self._unfinished.clear()

    async def _run_samples(self, engine: Generation, load: KvLoad | None, done: OnPart) -> None:
        requests = self._requests(load)
        self._unfinished = {request.id for request in requests}
        completions = await engine.submit(requests)
        if self.end_reason:
            await engine.abort(list(self._unfinished))
        pending = {r.id: completion for r, completion in zip(requests, completions, strict=True)}
        async with self._deadline(engine):
            await self._gather(engine, pending, done)
            await self._settle_aborted(engine, done)

    def _requests(self, load: KvLoad | None) -> list[SampleRequest]:
        """Engine requests of a group's samples and of its prompt prefills, in submission order.

        If the samples load KV, the prefills come first, since the samples use the blocks that the
        prefills leave. Otherwise the prefills come after the first sample, which they must not
        delay: other groups may wait for the KV that this sample writes.
        """
        pending = self._pending_indices()
        first, *others = [self._request(i, self.sample_ids[i], load) for i in pending]
        slot = self.exports.prompt_slot if self.exports else self.source.export
        first = first if slot is None else replace(first, export=slot)
        if load is not None:
            return [*self.source.prefills, first, *others]
        return [first, *self.source.prefills, *others]

    def _pending_indices(self) -> list[int]:
        """Indices of the samples that had not finished when the group was resumed."""
        finished = {sample.index for sample in self.ended}
        return [index for index in range(self.options.n) if index not in finished]

    def _request(self, index: int, sample_id: str, load: KvLoad | None) -> SampleRequest:
        options, prompt = self.options, self.options.prompt_token_ids
        prior_tokens = sample_answer.prior_tokens(options, index)
        if prior_tokens:
            prompt = [*prompt, *prior_tokens]
        max_tokens = options.sampling.max_tokens - len(prior_tokens)
        return SampleRequest(
            id=sample_id,
            prompt_token_ids=prompt,
            sampling=options.sampling.after(len(prior_tokens), max_tokens),
            seed=sample_seed(options, index),
            priority=options.priority,
            cache_salt=options.cache_salt,
            kept_kv=options.kept_kv,
            session_id=options.session_id,
            group=self.name,
            speculation=options.speculation,
            load=load,
            adapter=options.adapter,
            num_top_logprobs=options.num_top_logprobs,
            logprob_token_ids=options.logprob_token_ids,
            raw_logprobs=options.raw_logprobs,
            on_tokens=None if self.on_tokens is None else partial(self._on_delta, index),
            num_prior_tokens=len(prior_tokens),
            num_drawn_tokens=len(prior_tokens) - num_given(options, index),
            support=options.support_vocab_size is not None,
            experts_from=sample_answer.experts_from(options, index),
        )

    @asynccontextmanager
    async def _deadline(self, engine: Generation) -> AsyncIterator[None]:
        """Context manager that ends the group if its deadline passes inside the context.

        The time spent in such contexts is added up. The submission of the requests is outside of
        them.
        """
        if self.options.deadline_seconds is None:
            yield
            return
        clock = asyncio.get_running_loop().time
        began_at, left = clock(), max(0.0, self.options.deadline_seconds - self.seconds_used)
        timer = asyncio.create_task(self._end_at_deadline(engine, left))
        try:
            yield
        finally:
            timer.cancel()
            self.seconds_used += clock() - began_at

    async def _end_at_deadline(self, engine: Generation, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self.end(engine, "deadline")

    async def _gather(
        self, engine: Generation, pending: Mapping[str, Awaitable[Completion]], done: OnPart
    ) -> None:
        """Wait for the group's samples; `pending` maps request ids to completions."""
        self.began_at = asyncio.get_running_loop().time() - self.seconds_before
        async with asyncio.TaskGroup() as tasks:
            if self.source.prefills:
                tasks.create_task(self._collect_prefills(pending))
            for index in self._pending_indices():
                completion = pending[self.sample_ids[index]]
                tasks.create_task(self._await_sample(engine, index, completion, done))

    async def _collect_prefills(self, pending: Mapping[str, Awaitable[Completion]]) -> None:
        for request in self.source.prefills:
            await self.source.on_completed(request, await pending[request.id])
            self.on_finished(request.id)

    async def _await_sample(
        self, engine: Generation, index: int, completion: Awaitable[Completion], done: OnPart
    ) -> None:
        result = await completion
        if self.end_reason == "suspended" and result.finish == "abort":
            self.on_finished(self.sample_ids[index])
            self._aborted[index] = result
        else:
            await self._finish_sample(engine, index, result, done)

    async def _settle_aborted(self, engine: Generation, done: OnPart) -> None:
        """Suspend the samples that were aborted for it, unless the group has ended meanwhile."""
        for index, result in sorted(self._aborted.items()):
            if self.end_reason == "suspended" and not self._has_other_versions(result):
                tokens = await sample_answer.sample_tokens(self.options, index, result)
                self._note_cached_tokens(index, result)
                self.suspended[index] = tokens
            else:
                await self._finish_sample(engine, index, result, done)

    def _has_other_versions(self, result: Completion) -> bool:
        """True if a version other than the required one generated some of the tokens."""
        return num_valid_tokens(self.options, result) < len(result.token_ids)

    def _note_cached_tokens(self, index: int, result: Completion) -> None:
        # A resumed sample also has cached tokens after the prompt; these are not counted.
        num_prompt = len(self.options.prompt_token_ids)
        self.cached_tokens.setdefault(index, min(result.num_cached_tokens, num_prompt))

    async def _finish_sample(
        self, engine: Generation, index: int, result: Completion, done: OnPart
    ) -> None:
        self.sample_seconds.append(asyncio.get_running_loop().time() - self.began_at)
        self.on_finished(self.sample_ids[index])
        if result.top_logprobs is not None and not self.options.answers_top_logprobs:
            self.top_logprobs[index] = result.top_logprobs[: num_valid_tokens(self.options, result)]
        self._note_cached_tokens(index, result)
        await self._on_sample_end(engine, index, result)
        await self.turns.wait()
        finish_reason = self._finish_reason(result)
        answer = await sample_answer.create(self.options, index, result, finish_reason)
        self.ended.append(answer)
        done(answer)

    async def _on_sample_end(self, engine: Generation, index: int, result: Completion) -> None:
        """Count a finished sample; if the finish policy is now met, abort the others."""
        self.num_done += 1
        if self.finish_policy is None or result.finish not in ("stop", "length"):
            return
        num_prior = len(sample_answer.prior_tokens(self.options, index))
        length = len(result.token_ids) + num_prior
        if self.finish_policy.on_sample_end(index, length) and self._unfinished:
            await self.end(engine, "surplus")

    def _on_delta(self, index: int, delta: TokenDelta) -> None:
        """Pass on the new tokens of a running sample, without those that its answer will lack."""
        start = self._num_streamed[index]
        end = valid_end(self.options, delta.versions, delta.start + len(delta.token_ids))
        if delta.start != start or end <= start:
            return  # an earlier token is not valid
        self._num_streamed[index] = end
        num_tokens = end - start
        if delta.top_logprobs is not None and not self.options.answers_top_logprobs:
            streamed = self.top_logprobs.setdefault(index, [])
            assert isinstance(streamed, list)
            streamed.extend(delta.top_logprobs[:num_tokens])
        assert self.on_tokens is not None, "deltas were requested"
        spans = wire_spans(delta.versions, self.options.adapter)
        tokens: TokenLists = TokenColumns(
            token_ids=delta.token_ids[:num_tokens],
            logprobs=delta.logprobs[:num_tokens],
            versions=tuple(cut_spans(spans, start, end)),
        )
        self.on_tokens(index, tokens)

    def _finish_reason(self, result: Completion) -> FinishReason:
        if self._has_other_versions(result):
            return "version_changed"
        return self._aborted_reason() if result.finish == "abort" else result.finish

    def _aborted_reason(self) -> FinishReason:
        reason = self.end_reason
        if reason is None or reason == "cancelled" or reason == "suspended":
            return "aborted"
        return reason

    def _answer(self, samples: list[SampleAnswer]) -> GroupAnswer:
        return GroupAnswer(
            id=self.options.id,
            index=self.options.index,
            outcome=self._outcome(samples),
            num_prompt_tokens=len(self.options.prompt_token_ids),
            prompt_token_ids=self.options.prompt_token_ids if self.options.echo else None,
            num_cached_tokens=self.cached_tokens[0],
            num_continued_tokens=sum(given_tokens(self.options)),
            selected=None if self.finish_policy is None else self.finish_policy.selected,
            samples=samples,
            prompt_logprobs=self.prompt_logprobs,
        )

    def _outcome(self, samples: list[SampleAnswer]) -> Outcome:
        reasons = Counter(sample.finish_reason for sample in samples)
        if reasons["stop"] + reasons["length"] == self.options.n or (
            self.finish_policy and self.finish_policy.is_met
        ):
            return "done"
        if reasons["error"] == self.options.n:
            return "failed"
        return "cancelled" if self.end_reason == "cancelled" else "partial"

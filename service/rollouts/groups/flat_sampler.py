"""Sampler of n independent samples of a prompt; can be suspended and resumed."""

import asyncio
import uuid
from collections import Counter
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from functools import partial

from coppice.wire.columns.token_columns import TokenColumns, TokenLists
from coppice.wire.columns.weights_version_spans import cut_spans
from coppice.wire.rollouts import GroupAnswer, Outcome
from engine.protocol.generation import Generation
from engine.types.kv import KvLoad
from engine.types.samples import Completion, OnTokens, SampleRequest, TokenDelta
from service.rollouts.groups import sample_answer
from service.rollouts.groups.group import EndReason, Group, OnPart
from service.rollouts.groups.options import num_given, sample_seed
from service.rollouts.groups.sample_answer import num_valid_tokens, valid_end, wire_spans


class FlatSampler:
    """Sampler of samples without a tree.

    It has no reference to its group, so that the memory of an ended group is free at once.
    """

    paths = None
    is_grown_by_caller = False

    async def run(self, group: Group, engine: Generation, done: OnPart) -> GroupAnswer | None:
        return await _Samples(group, engine, done).run()

    def on_end(self, end_reason: EndReason) -> None:
        pass


class _Samples:
    """Samples of a group: submits a request for each, and collects their answers."""

    def __init__(self, group: Group, engine: Generation, done: OnPart) -> None:
        self._group, self._engine, self._done = group, engine, done
        self._aborted: dict[int, Completion] = {}
        self._num_streamed = Counter[int]()

    async def run(self) -> GroupAnswer | None:
        """Run the samples and return the answer; None if the group was suspended."""
        group, engine = self._group, self._engine
        group.sample_ids = [uuid.uuid4().hex for _ in range(group.options.n)]
        async with group.deadline(engine):
            load = await group.source.prepare(engine, group)
        pending = await self._submit(self._requests(load))
        async with group.deadline(engine):
            await self._gather(pending)
            await self._settle_aborted()
        if group.suspended:
            return None
        samples = sorted(group.ended, key=lambda sample: sample.index)
        return group.answer(self._outcome(), samples)

    async def _submit(self, requests: list[SampleRequest]) -> dict[str, Awaitable[Completion]]:
        """Submit the requests; returns their completions by id."""
        for request in requests:
            self._group.on_submitted(request.id)
        completions = await self._engine.submit(requests)
        if self._group.ends:
            await self._engine.abort([request.id for request in requests])
        return {r.id: completion for r, completion in zip(requests, completions, strict=True)}

    def _requests(self, load: KvLoad | None) -> list[SampleRequest]:
        """Engine requests of the samples and of the group's prompt prefills, in submission order.

        If the samples load KV, the prefills come first, since the samples use the blocks that the
        prefills leave. Otherwise the prefills come after the first sample, which they must not
        delay: other groups may wait for the KV that this sample writes.
        """
        group = self._group
        first, *others = [self._request(index, load) for index in self._pending_indices()]
        slot = group.exports.prompt_slot if group.exports else group.source.export
        first = first if slot is None else replace(first, export=slot)
        if load is not None:
            return [*group.source.prefills, first, *others]
        return [first, *group.source.prefills, *others]

    def _pending_indices(self) -> list[int]:
        """Indices of the samples that had not finished when the group was resumed."""
        finished = {sample.index for sample in self._group.ended}
        return [index for index in range(self._group.options.n) if index not in finished]

    def _request(self, index: int, load: KvLoad | None) -> SampleRequest:
        group, options = self._group, self._group.options
        prompt, prior = options.prompt_token_ids, sample_answer.prior_tokens(options, index)
        return group.request(
            group.sample_ids[index],
            [*prompt, *prior] if prior else prompt,
            seed=sample_seed(options, index),
            num_prior_tokens=len(prior),
            max_tokens=options.sampling.max_tokens - len(prior),
            load=load,
            on_tokens=self._on_tokens(index),
            num_drawn_tokens=len(prior) - num_given(options, index),
            experts_from=sample_answer.experts_from(options, index),
        )

    def _on_tokens(self, index: int) -> OnTokens | None:
        group = self._group
        is_observed = group.observer is not None and group.options.stream_tokens
        return partial(self._on_delta, index) if group.on_tokens or is_observed else None

    async def _gather(self, pending: Mapping[str, Awaitable[Completion]]) -> None:
        """Wait for the group's samples; `pending` maps request ids to completions."""
        group = self._group
        group.began_at = asyncio.get_running_loop().time() - group.seconds_before
        async with asyncio.TaskGroup() as tasks:
            if group.source.prefills:
                tasks.create_task(self._collect_prefills(pending))
            for index in self._pending_indices():
                completion = pending[group.sample_ids[index]]
                tasks.create_task(self._await_sample(index, completion))

    async def _collect_prefills(self, pending: Mapping[str, Awaitable[Completion]]) -> None:
        group = self._group
        for request in group.source.prefills:
            await group.source.on_completed(request, await pending[request.id])
            group.on_finished(request.id)

    async def _await_sample(self, index: int, completion: Awaitable[Completion]) -> None:
        group, result = self._group, await completion
        if group.end_reason == "suspended" and result.finish == "abort":
            group.on_finished(group.sample_ids[index])
            self._aborted[index] = result
        else:
            await self._finish_sample(index, result)

    async def _settle_aborted(self) -> None:
        """Suspend the samples that were aborted for it, unless the group has ended meanwhile."""
        group = self._group
        for index, result in sorted(self._aborted.items()):
            if group.end_reason == "suspended" and not group.has_other_versions(result):
                tokens = await sample_answer.sample_tokens(group.options, index, result)
                group.note_cached_tokens(index, result)
                group.suspended[index] = tokens
            else:
                await self._finish_sample(index, result)

    async def _finish_sample(self, index: int, result: Completion) -> None:
        group, options = self._group, self._group.options
        group.count_sample()
        group.on_finished(group.sample_ids[index])
        if result.top_logprobs is not None and not options.answers_top_logprobs:
            group.top_logprobs[index] = result.top_logprobs[: num_valid_tokens(options, result)]
        group.texts[index] = None if group.has_other_versions(result) else result.text
        group.note_cached_tokens(index, result)
        await self._apply_finish_policy(index, result)
        await group.turns.wait()
        finish_reason = group.finish_reason(result)
        tokens = await sample_answer.sample_tokens(options, index, result)
        answer = await sample_answer.create(
            options, index, tokens, finish_reason, result.stop_reason
        )
        group.ended.append(answer)
        self._done(answer)

    async def _apply_finish_policy(self, index: int, result: Completion) -> None:
        """Abort the other samples if the finish policy is met with this one."""
        group = self._group
        if group.finish_policy is None or result.finish not in ("stop", "length"):
            return
        num_prior = len(sample_answer.prior_tokens(group.options, index))
        length = len(result.token_ids) + num_prior
        if group.finish_policy.on_sample_end(index, length) and group.num_running:
            await group.end(self._engine, "surplus")

    def _on_delta(self, index: int, delta: TokenDelta) -> None:
        """Pass on the new tokens of a running sample, without those that its answer will lack."""
        group, start = self._group, self._num_streamed[index]
        end = valid_end(group.options, delta.versions, delta.start + len(delta.token_ids))
        if delta.start != start or end <= start:
            return  # an earlier token is not valid
        self._num_streamed[index] = end
        num_tokens = end - start
        if group.observer is not None:
            if num_tokens == len(delta.token_ids):
                group.observer.on_delta(index, delta)
            return
        assert group.on_tokens is not None, "deltas were requested"
        spans = wire_spans(delta.versions, group.options.adapter)
        tokens: TokenLists = TokenColumns(
            token_ids=delta.token_ids[:num_tokens],
            logprobs=delta.logprobs[:num_tokens],
            versions=tuple(cut_spans(spans, start, end)),
        )
        group.on_tokens(index, tokens)

    def _outcome(self) -> Outcome:
        group, num_samples = self._group, self._group.options.n
        reasons = Counter(sample.finish_reason for sample in group.ended)
        if reasons["stop"] + reasons["length"] == num_samples or (
            group.finish_policy and group.finish_policy.is_met
        ):
            return "done"
        if reasons["error"] == num_samples:
            return "failed"
        return "cancelled" if group.end_reason == "cancelled" else "partial"

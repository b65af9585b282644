"""Group whose samples start from a prompt with reused KV."""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace

from coppice.wire.rollouts import GroupAnswer, SampleAnswer
from engine.protocol import Engine
from engine.types import Completion, SampleRequest
from service.kv_reuse.group_reuse import ReuseReport
from service.kv_reuse.monitor import ReuseFailed
from service.kv_reuse.prompt_plan import PromptPlan
from service.rollouts.group import EndReason, Group, OnPart


@dataclass(slots=True, kw_only=True, eq=False)
class KvReuseGroup(Group):
    """Group that prepares its prompt with a PromptPlan.

    Cancelling `run` at any point aborts all its engine requests: writers of spans, prefill requests
    and samples.
    """

    plan: PromptPlan
    reuse: ReuseReport
    _over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ends(self) -> bool:
        return self.end_reason is not None

    async def wait_for_end(self) -> None:
        await self._over.wait()

    async def end(self, engine: Engine, end_reason: EndReason) -> None:
        self._over.set()
        await Group.end(self, engine, end_reason)

    def on_submitted(self, request_id: str) -> None:
        self._unfinished.add(request_id)

    def on_finished(self, request_id: str) -> None:
        self._unfinished.discard(request_id)

    async def run(self, engine: Engine, done: OnPart) -> GroupAnswer:
        clock = asyncio.get_running_loop().time
        started_at, is_complete = clock(), False
        try:
            async with self._deadline(engine):
                await self._prepare(engine)
            if self.deadline_seconds is not None:
                self.deadline_seconds = max(0.0, self.deadline_seconds - (clock() - started_at))
            answer = await Group.run(self, engine, done)
            is_complete = all(
                sample.finish_reason in ("stop", "length") for sample in answer.samples
            )
            return answer
        finally:
            await engine.abort(list(self._unfinished))
            self._unfinished.clear()
            self.plan.release(settled=is_complete)

    async def _prepare(self, engine: Engine) -> None:
        """Prepare the prompt; the samples load the plan's KV, or nothing if the plan failed."""
        try:
            self.load = await self.plan.prepare(engine, self)
            self.reuse.reason = self.plan.reason
        except ReuseFailed as failure:
            await engine.abort(list(self._unfinished))
            self._unfinished.clear()
            self.reuse.reason = failure.reason
            self.plan.release(settled=False)
        self.reuse.num_prepared = self.plan.lease.num_prepared
        self.reuse.round_trips = self.plan.lease.round_trips + 1

    def _requests(self) -> list[SampleRequest]:
        """Requests of the samples and of the plan's prefills, in submission order.

        If the samples load KV, the prefills come first, since samples use the blocks that these
        leave. Otherwise they come after the first sample, whose prefill they must not delay: other
        groups may wait for the KV that it writes.
        """
        first, *others = Group._requests(self)
        samples = [replace(first, export=self.plan.export), *others]
        at = self._prefills_at
        return [*samples[:at], *self.plan.prefill_requests, *samples[at:]]

    @property
    def _prefills_at(self) -> int:
        return 1 if self.load is None else 0

    async def _gather(
        self, engine: Engine, completions: list[Awaitable[Completion]], done: OnPart
    ) -> list[tuple[SampleAnswer, int]]:
        begin = self._prefills_at
        end = begin + len(self.plan.prefill_requests)
        prefill_requests, samples = completions[begin:end], completions[:begin] + completions[end:]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._collect_prefills(prefill_requests))
            finished = await Group._gather(self, engine, samples, done)
        return finished

    async def _collect_prefills(self, completions: Sequence[Awaitable[Completion]]) -> None:
        for request, completion in zip(self.plan.prefill_requests, completions, strict=True):
            await self.plan.on_completed(request, await completion)
            self.on_finished(request.id)

    def _answer(self, finished: list[tuple[SampleAnswer, int]]) -> GroupAnswer:
        """Complete the reuse report and return the answer.

        If the engine loaded nothing, because it no longer knows the exported KV, the prompt was
        prefilled.
        """
        self.reuse.num_computed = self.plan.num_computed
        self.reuse.num_prepared = self.plan.lease.num_prepared
        if self.load is not None:
            first, num_cached = finished[0]
            self.reuse.exact = not self.plan.is_approximate(num_cached)
            if self.plan.is_loaded(num_cached):
                self.reuse.num_anchors = self.plan.num_anchors
            else:
                self.reuse.reason = "not_loaded"
                if first.finish_reason in ("stop", "length"):
                    self.plan.forget()
        return Group._answer(self, finished)

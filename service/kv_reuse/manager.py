"""KV reuse manager: prompts given as spans are reordered, spliced, predicted or unchanged."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from coppice.wire.reuse import Reuse, ReuseAnswer, ReuseMode, ReuseReason
from coppice.wire.rollouts import GroupAnswer, RolloutRequest
from engine.kv_types import ExportSlot, KvLoad
from engine.protocol import Engine
from engine.types import Completion, SampleRequest
from service.kv_reuse.anchor_selection import DistanceCache
from service.kv_reuse.anchors import AnchorStore
from service.kv_reuse.prediction import PredictionPlan
from service.kv_reuse.span_cache import SpanCache
from service.kv_reuse.span_lease import ReuseFailed, SpanLease
from service.kv_reuse.spans import (
    APPROXIMATE_MODES,
    DEFAULT_FIRST_TOKENS,
    DEFAULT_THRESHOLD,
    REUSE_OFF,
    PrefixOrders,
    PromptSpan,
    Scope,
    joined,
    spans_of_prompt,
)
from service.kv_reuse.splicing import SplicePlan
from service.rollouts.options import GroupOptions
from service.rollouts.prompt_source import GroupMonitor, PromptSource

PromptPlan = SplicePlan | PredictionPlan


class KvReuseManager:
    """Span cache, anchors and span orders of earlier prompts, and the prompt sources that use them.

    `cache` opens once the engine serves.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        directory: Path,
        capacity_bytes: int,
        epoch: Callable[[], int],
    ) -> None:
        self._orders = PrefixOrders(epoch)
        self.cache = SpanCache(
            engine, directory=directory, capacity_bytes=capacity_bytes, epoch=epoch
        )
        self.anchors = AnchorStore(self.cache)
        self._distances = DistanceCache(self.cache)

    async def close(self) -> None:
        self._distances.close()
        await self.anchors.close()
        await self.cache.close()

    def prompt_source(
        self, request: RolloutRequest, options: GroupOptions
    ) -> tuple[GroupOptions, PromptSource]:
        """Source of a prompt given as spans, and the options with the prompt in its final order."""
        spans = spans_of_prompt(request.groups[options.index].prompt)
        reuse, scope = request.reuse or REUSE_OFF, Scope(options.owner, options.cache_salt)
        if reuse.mode in APPROXIMATE_MODES:
            plan = self._create_plan(reuse, scope, spans, options)
            return options, SpanPrompt(mode=reuse.mode, plan=plan)
        order = self._orders.suggest(scope, spans) if reuse.mode == "order" else None
        is_applied = order is not None and reuse.apply is not False
        if order is not None and is_applied:
            spans = [spans[index] for index in order]
            options = replace(options, prompt_token_ids=joined(spans))
        self._orders.remember(scope, spans)
        return options, SpanPrompt(mode=reuse.mode, order=order, is_applied=is_applied)

    def _create_plan(
        self, reuse: Reuse, scope: Scope, spans: Sequence[PromptSpan], options: GroupOptions
    ) -> PromptPlan:
        lease = SpanLease(cache=self.cache, scope=scope, priority=options.priority)
        if reuse.mode == "anchors":
            return PredictionPlan(
                lease=lease,
                anchors=self.anchors,
                distances=self._distances,
                spans=spans,
                threshold=DEFAULT_THRESHOLD if reuse.threshold is None else reuse.threshold,
                num_samples=options.n,
            )
        first_tokens = DEFAULT_FIRST_TOKENS if reuse.first_tokens is None else reuse.first_tokens
        return SplicePlan(
            lease=lease, spans=spans, first_tokens=first_tokens, num_samples=options.n
        )


@dataclass(slots=True, kw_only=True, eq=False)
class SpanPrompt:
    """PromptSource of a prompt given as spans; reports its KV reuse.

    Without a `plan` the samples prefill it, after its spans were sorted by `order` if `is_applied`.
    With one they load what the plan prepares, or nothing if that fails.
    """

    mode: ReuseMode
    order: list[int] | None = None
    is_applied: bool = False
    plan: PromptPlan | None = None
    _reason: ReuseReason | None = None
    _is_prepared: bool = False

    @property
    def prefills(self) -> Sequence[SampleRequest]:
        return () if self.plan is None else self.plan.prefills

    @property
    def export(self) -> ExportSlot | None:
        return None if self.plan is None else self.plan.export

    async def prepare(self, engine: Engine, monitor: GroupMonitor) -> KvLoad | None:
        if self.plan is None:
            return None
        try:
            load = await self.plan.prepare(engine, monitor)
        except ReuseFailed as failure:
            await monitor.abort_requests(engine)
            self._reason = failure.reason
            self.plan.release(settled=False)
            return None
        self._reason, self._is_prepared = self.plan.reason, load is not None
        return load

    async def on_completed(self, request: SampleRequest, done: Completion) -> None:
        assert self.plan is not None, "there is no prefill without a plan"
        await self.plan.on_completed(request, done)

    def annotated(self, answer: GroupAnswer) -> GroupAnswer:
        plan, is_exact, num_anchors = self.plan, True, 0
        if plan is not None and self._is_prepared:
            is_exact = not plan.is_approximate(answer.num_cached_tokens)
            num_anchors = self._num_anchors(plan, answer)
        last = answer.num_prompt_tokens - answer.num_cached_tokens
        computed = last + (0 if plan is None else plan.num_computed)
        report = ReuseAnswer(
            mode=self.mode,
            tokens_reused=max(0, answer.num_prompt_tokens - computed),
            tokens_computed=computed,
            tokens_prepared=0 if plan is None else plan.lease.num_prepared,
            round_trips=1 + (0 if plan is None else plan.lease.round_trips),
            anchors=num_anchors,
            order=self.order,
            applied=self.is_applied,
            reason=self._reason,
        )
        return answer.model_copy(update={"exact": is_exact, "reuse": report})

    def release(self, *, settled: bool) -> None:
        if self.plan is not None:
            self.plan.release(settled=settled)

    def _num_anchors(self, plan: PromptPlan, answer: GroupAnswer) -> int:
        """Number of anchors used: none if the engine no longer knows the KV and has prefilled."""
        if plan.is_loaded(answer.num_cached_tokens):
            return plan.num_anchors
        self._reason = "not_loaded"
        if answer.samples[0].finish_reason in ("stop", "length"):
            plan.forget()
        return 0

"""KV reuse for prompts given as spans: splicing of cached spans, or prediction."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coppice.wire.kv_reuse import KvReuse, KvReuseAnswer, KvReuseMode, KvReuseReason
from coppice.wire.rollouts import GroupAnswer, PromptSpan
from engine.protocol.generation import Generation
from engine.protocol.prompt_kv import PromptKv
from engine.types.kv import ExportSlot, KvLoad
from engine.types.samples import Completion, SampleRequest
from service.kv.prompt_source import GroupMonitor, PromptSource
from service.kv.spans.index import SpanIndex
from service.kv.spans.observation_selection import DistanceCache
from service.kv.spans.observations import Observations
from service.kv.spans.pinned_spans import PinnedSpans, ReuseFailed
from service.kv.spans.prediction import PredictionPlan
from service.kv.spans.prompt_template import (
    DEFAULT_MAX_ENTROPY,
    DEFAULT_RECOMPUTE_TOKENS,
    REUSE_OFF,
    Scope,
)
from service.kv.spans.splicing import SplicePlan
from service.versions import Versions

PromptPlan = SplicePlan | PredictionPlan


class KvReuseManager:
    """Manages KV reuse between prompts, from cached spans and observed prompts.

    Open `spans` once the engine serves.
    """

    def __init__(
        self,
        engine: PromptKv,
        versions: Versions,
        *,
        directory: Path,
        capacity_bytes: int | None,
    ) -> None:
        self.spans = SpanIndex(
            engine,
            directory=directory,
            capacity_bytes=capacity_bytes,
            epoch=lambda: versions.epoch,
        )
        self.observations = Observations(self.spans)
        self._distances = DistanceCache(self.spans)

    async def close(self) -> None:
        self._distances.close()
        await self.observations.close()
        await self.spans.store.close()

    def prompt_source(
        self,
        spans: Sequence[PromptSpan],
        reuse: KvReuse | None,
        scope: Scope,
        *,
        priority: int,
        num_samples: int,
    ) -> PromptSource:
        """Source of the prompt KV of a group whose prompt is given as spans."""
        reuse = reuse or REUSE_OFF
        plan = None
        if reuse.mode != "off":
            pinned = PinnedSpans(index=self.spans, scope=scope, priority=priority)
            plan = self._create_plan(reuse, spans, pinned, num_samples)
        return SpanPrompt(mode=reuse.mode, plan=plan)

    def _create_plan(
        self, reuse: KvReuse, spans: Sequence[PromptSpan], pinned: PinnedSpans, num_samples: int
    ) -> PromptPlan:
        if reuse.mode == "predict":
            return PredictionPlan(
                pinned=pinned,
                observations=self.observations,
                distances=self._distances,
                spans=spans,
                max_entropy=DEFAULT_MAX_ENTROPY if reuse.max_entropy is None else reuse.max_entropy,
                num_samples=num_samples,
            )
        return SplicePlan(
            pinned=pinned,
            spans=spans,
            recompute_tokens=DEFAULT_RECOMPUTE_TOKENS
            if reuse.recompute_tokens is None
            else reuse.recompute_tokens,
            num_samples=num_samples,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class SpanPrompt:
    """PromptSource of a prompt given as spans, which also reports how much KV it reused.

    Without a `plan` the samples prefill the prompt. With a plan they load the KV that the plan
    prepares, or prefill if the preparation fails.
    """

    mode: KvReuseMode
    plan: PromptPlan | None
    _reason: KvReuseReason | None = None
    _is_prepared: bool = False

    @property
    def prefills(self) -> Sequence[SampleRequest]:
        return () if self.plan is None else self.plan.prefills

    @property
    def export(self) -> ExportSlot | None:
        return None if self.plan is None else self.plan.export

    async def prepare(self, engine: Generation, monitor: GroupMonitor) -> KvLoad | None:
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
        plan, is_exact, num_observations = self.plan, True, 0
        if plan is not None and self._is_prepared:
            is_exact = not plan.is_approximate(answer.num_cached_tokens)
            num_observations = self._num_observations(plan, answer)
        last = answer.num_prompt_tokens - answer.num_cached_tokens
        computed = last + (0 if plan is None else plan.num_computed)
        report = KvReuseAnswer(
            mode=self.mode,
            num_reused_tokens=max(0, answer.num_prompt_tokens - computed),
            num_computed_tokens=computed,
            num_prepared_tokens=0 if plan is None else plan.pinned.num_prepared,
            num_round_trips=1 + (0 if plan is None else plan.pinned.round_trips),
            num_observations=num_observations,
            reason=self._reason,
        )
        return answer.model_copy(update={"exact": is_exact, "kv_reuse": report})

    def release(self, *, settled: bool) -> None:
        if self.plan is not None:
            self.plan.release(settled=settled)

    def _num_observations(self, plan: PromptPlan, answer: GroupAnswer) -> int:
        """Number of observations from which a prompt was predicted; 0 if it was prefilled."""
        if plan.is_loaded(answer.num_cached_tokens):
            return plan.num_observations
        self._reason = "not_loaded"
        if answer.samples[0].finish_reason in ("stop", "length"):
            plan.forget()
        return 0

"""Creation of groups with prompt spans: reordered, spliced, predicted or unchanged."""

from collections.abc import Callable
from pathlib import Path

from coppice.wire.reuse import Reuse
from coppice.wire.rollouts import RolloutRequest
from engine.protocol import Engine
from service.kv_reuse.anchor_selection import DistanceCache
from service.kv_reuse.anchors import AnchorStore
from service.kv_reuse.group import KvReuseGroup
from service.kv_reuse.group_reuse import ReuseReport
from service.kv_reuse.prediction import AnchorPlan
from service.kv_reuse.prompt_plan import PromptPlan
from service.kv_reuse.span_cache import SegmentCache
from service.kv_reuse.span_lease import SegmentLease
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
from service.rollouts.finish_policy import FinishPolicy
from service.rollouts.group import Group, GroupOptions


class KvReuse:
    """Span cache, anchors and span orders of earlier prompts; factory of groups that use them."""

    def __init__(
        self,
        engine: Engine,
        *,
        directory: Path,
        capacity_bytes: int,
        epoch: Callable[[], int],
    ) -> None:
        self._orders = PrefixOrders(epoch)
        self.store = SegmentCache(
            engine, directory=directory, capacity_bytes=capacity_bytes, epoch=epoch
        )
        self.anchors = AnchorStore(self.store)
        self._distances = DistanceCache(self.store)

    async def close(self) -> None:
        self._distances.close()
        await self.anchors.close()
        await self.store.close()

    def plan_order(self, request: RolloutRequest, options: GroupOptions) -> GroupOptions:
        """Apply the requested span order to the group's prompt and attach its reuse report."""
        spans = spans_of_prompt(request.groups[options["index"]].prompt)
        if spans is None:
            return options
        requested, scope = request.reuse or REUSE_OFF, _scope(options)
        reuse = ReuseReport(mode=requested.mode)
        if requested.mode == "order":
            spans = self._reorder(requested, scope, spans, reuse)
            options["prompt_token_ids"] = joined(spans)
        if requested.mode not in APPROXIMATE_MODES:
            self._orders.remember(scope, spans)
        options["reuse"] = reuse
        return options

    def kv_reuse_group(
        self, request: RolloutRequest, options: GroupOptions, *, finish_policy: FinishPolicy | None
    ) -> Group | None:
        """Group with approximate KV reuse; None if the request does not ask for it."""
        requested, reuse = request.reuse or REUSE_OFF, options["reuse"]
        if requested.mode not in APPROXIMATE_MODES or reuse is None:
            return None
        fields = {**options, "reuse": reuse}
        plan = self._create_plan(request, requested, options)
        return KvReuseGroup(finish_policy=finish_policy, plan=plan, **fields)  # type: ignore[arg-type]

    def _create_plan(
        self, request: RolloutRequest, requested: Reuse, options: GroupOptions
    ) -> PromptPlan:
        spans = spans_of_prompt(request.groups[options["index"]].prompt)
        assert spans is not None, "checked with the request"
        lease = SegmentLease(store=self.store, scope=_scope(options), priority=options["priority"])
        if requested.mode == "anchors":
            return AnchorPlan(
                lease=lease,
                anchors=self.anchors,
                distances=self._distances,
                spans=spans,
                threshold=DEFAULT_THRESHOLD if requested.threshold is None else requested.threshold,
                num_samples=options["n"],
            )
        return SplicePlan(
            lease=lease,
            spans=spans,
            first_tokens=DEFAULT_FIRST_TOKENS
            if requested.first_tokens is None
            else requested.first_tokens,
            num_samples=options["n"],
        )

    def _reorder(
        self, requested: Reuse, scope: Scope, spans: list[PromptSpan], reuse: ReuseReport
    ) -> list[PromptSpan]:
        reuse.order = self._orders.suggest(scope, spans)
        if requested.apply is False:
            return spans
        reuse.applied = True
        return [spans[index] for index in reuse.order]


def _scope(options: GroupOptions) -> Scope:
    return Scope(options["owner"], options["cache_salt"])

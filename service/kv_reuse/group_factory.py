"""From a prompt in segments to its group: in another order, with a chain in front, or as it is."""

from collections.abc import Callable
from pathlib import Path

from coppice.wire.reuse import Reuse
from coppice.wire.rollouts import RolloutRequest
from engine.protocol import Engine
from service.kv_reuse.anchor_plan import Anchored
from service.kv_reuse.anchors import Anchors
from service.kv_reuse.group import ChainedGroup
from service.kv_reuse.group_reuse import GroupReuse
from service.kv_reuse.kv_distance import Distances
from service.kv_reuse.layout import Part, joined
from service.kv_reuse.lease import Borrowed
from service.kv_reuse.prefix_order import Orders, Scope
from service.kv_reuse.prompt_plan import Preparation
from service.kv_reuse.splice_plan import Chain
from service.kv_reuse.store import SegmentStore
from service.kv_reuse.validation import APPROXIMATE, FIRST_TOKENS, OFF, THRESHOLD, parts_of
from service.rollouts.finish_policy import Enough
from service.rollouts.group import Group, GroupFields


class Segments:
    """Owns what is known of earlier prompts in segments: their orders, and what is kept of them."""

    def __init__(
        self,
        engine: Engine,
        *,
        directory: Path,
        capacity_bytes: int,
        epoch: Callable[[], int],
    ) -> None:
        self._orders = Orders(epoch)
        self.store = SegmentStore(
            engine, directory=directory, capacity_bytes=capacity_bytes, epoch=epoch
        )
        self.anchors = Anchors(self.store)
        self._distances = Distances(self.store)

    async def close(self) -> None:
        self._distances.close()
        await self.anchors.close()
        await self.store.close()

    def settle(self, request: RolloutRequest, given: GroupFields) -> GroupFields:
        """The group's prompt in the order that it is computed in."""
        parts = parts_of(request.groups[given["index"]].prompt)
        if parts is None:
            return given
        asked, scope = request.reuse or OFF, _scope(given)
        reuse = GroupReuse(mode=asked.mode)
        if asked.mode == "order":
            parts = self._ordered(asked, scope, parts, reuse)
            given["prompt_token_ids"] = joined(parts)
        if asked.mode not in APPROXIMATE:
            self._orders.remember(scope, parts)
        given["reuse"] = reuse
        return given

    def chained(
        self, request: RolloutRequest, given: GroupFields, *, rule: Enough | None
    ) -> Group | None:
        """None unless its prompt is to be put together."""
        asked, reuse = request.reuse or OFF, given["reuse"]
        if asked.mode not in APPROXIMATE or reuse is None:
            return None
        fields = {**given, "reuse": reuse}
        chain = self._preparation(request, asked, given)
        return ChainedGroup(rule=rule, chain=chain, **fields)  # type: ignore[arg-type]

    def _preparation(
        self, request: RolloutRequest, asked: Reuse, given: GroupFields
    ) -> Preparation:
        parts = parts_of(request.groups[given["index"]].prompt)
        assert parts is not None, "checked with the request"
        borrowed = Borrowed(store=self.store, scope=_scope(given), priority=given["priority"])
        if asked.mode == "anchors":
            return Anchored(
                borrowed=borrowed,
                anchors=self.anchors,
                distances=self._distances,
                parts=parts,
                threshold=THRESHOLD if asked.threshold is None else asked.threshold,
                num_samples=given["n"],
            )
        return Chain(
            borrowed=borrowed,
            parts=parts,
            first_tokens=FIRST_TOKENS if asked.first_tokens is None else asked.first_tokens,
            num_samples=given["n"],
        )

    def _ordered(
        self, asked: Reuse, scope: Scope, parts: list[Part], reuse: GroupReuse
    ) -> list[Part]:
        reuse.order = self._orders.suggest(scope, parts)
        if asked.apply is False:
            return parts
        reuse.applied = True
        return [parts[index] for index in reuse.order]


def _scope(given: GroupFields) -> Scope:
    return Scope(given["owner"], given["cache_salt"])

"""Export of the KV of suspended samples, which the receiver of a move loads instead of a prefill.

The samples have been aborted, but their full blocks are in the prefix cache. A request per sample
prefills the token after them and exports them: those of the prompt once per group, and the others
per sample. KV of another weights version than the active one is not exported.

A drain has little time. So KV is exported only while an estimate of the time for all of it is
within the time for moves. All other samples are prefilled by the receiver.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from coppice.wire.moves import MovedGroupKv, MovedKv
from coppice.wire.rollouts import SampleAnswer
from engine.errors import EngineError
from engine.kv_types import ExportSlot, KvLoad
from engine.protocol import Engine
from engine.types import SampleRequest
from service.moves.exports import (
    MAX_TIME_SHARE,
    PREFILL_ONLY,
    KvUnavailable,
    MoveExports,
    PrefillReason,
    owner_of,
)
from service.prompt_kv.exports import Export
from service.rollouts.fairness import TimeSlice
from service.rollouts.group import Group
from service.rollouts.rollout import Rollout
from service.trees.tree_group import TreeGroup

KvMoveOutcome = Literal["loaded", "tree", PrefillReason]
"""`loaded`, or the reason for which a moved sample or path is prefilled."""
OnKvMoved = Callable[[KvMoveOutcome, int], None]
"""Receives what happened to the KV of moved samples, and their number."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Tokens [first, end) of a prompt and its response, in full blocks.

    If the sample itself was moved here, its blocks are private to the chain of its `load`.
    """

    prompt: Sequence[int]
    response: Sequence[int]
    first: int
    end: int
    load: KvLoad | None

    @property
    def token_ids(self) -> list[int]:
        """Tokens up to the end of the span, and the one after it."""
        return [*self.prompt, *self.response][: self.end + 1]


class KvExporter:
    """Exports the KV of suspended rollouts.

    `on_prefilled` is called with the number of samples that are moved without their KV.
    """

    def __init__(self, engine: Engine, exports: MoveExports, *, on_prefilled: OnKvMoved) -> None:
        self._engine = engine
        self._exports = exports
        self._on_prefilled = on_prefilled
        self._busy_until = 0.0

    @asynccontextmanager
    async def exported(
        self, rollout: Rollout, version: str, until: float
    ) -> AsyncIterator[MovedKv | None]:
        """Context manager in which other replicas can fetch the KV of a suspended rollout.

        None if no KV was exported by `until`, of which it uses only a part.
        """
        begun = list[Export]()
        try:
            ends_at = _now() + MAX_TIME_SHARE * (until - _now())
            groups = [group for group in rollout.groups if group.suspended]
            trees = (group for group in rollout.groups if isinstance(group, TreeGroup))
            if num_paths := sum(len(tree.suspended_paths) for tree in trees):
                # Forks are not requests of a path's chain. A tree in one chain would lose the
                # public prefix cache.
                self._on_prefilled("tree", num_paths)
            async with asyncio.TaskGroup() as tasks:
                work = [
                    tasks.create_task(self._try_group(rollout, group, version, ends_at, begun))
                    for group in groups
                ]
            found = [kv for task in work if (kv := task.result()) is not None]
            yield self._moved_kv(found, MAX_TIME_SHARE * (until - _now())) if found else None
        finally:
            self._exports.release(begun)

    def _moved_kv(self, groups: list[MovedGroupKv], seconds: float) -> MovedKv:
        return MovedKv.model_construct(
            boot_id=self._exports.boot_id,
            arena=str(self._exports.arena),
            seconds=max(seconds, 0.0),
            groups=groups,
        )

    async def _try_group(
        self, rollout: Rollout, group: Group, version: str, ends_at: float, begun: list[Export]
    ) -> MovedGroupKv | None:
        reason: PrefillReason = "failed"
        try:
            async with asyncio.timeout_at(ends_at):
                return await self._export(rollout, group, version, ends_at, begun)
        except KvUnavailable as error:
            reason = error.reason
        except TimeoutError:
            reason = "timeout"
        except EngineError as error:
            log.warning("the KV of a moved rollout was not exported: %s", type(error).__name__)
        self._on_prefilled(reason, len(group.suspended))
        return None

    async def _export(
        self, rollout: Rollout, group: Group, version: str, ends_at: float, begun: list[Export]
    ) -> MovedGroupKv:
        self._exports.check_enabled()
        if not all(_is_of_version(part, version) for part in group.suspended):
            raise KvUnavailable("other_version")
        prompt, own = _spans(group, self._engine.info.block_size)
        spans = [span for span in (prompt, *own) if span is not None]
        self._reserve_time(sum(span.end - span.first for span in spans), ends_at)
        exports = await self._write(rollout, group, spans, begun)
        moved = {span: self._exports.moved_span(export, span.first) for span, export in exports}
        return MovedGroupKv.model_construct(
            index=group.options.index,
            prompt=None if prompt is None else moved[prompt],
            samples=[None if span is None else moved[span] for span in own],
        )

    def _reserve_time(self, num_tokens: int, ends_at: float) -> None:
        """Reserve the time to copy these tokens' KV after that of other groups."""
        until = max(_now(), self._busy_until) + self._exports.estimated_seconds(num_tokens)
        if until > ends_at:
            raise KvUnavailable("too_large")
        self._busy_until = until

    async def _write(
        self, rollout: Rollout, group: Group, spans: Sequence[Span], begun: list[Export]
    ) -> list[tuple[Span, Export]]:
        """Have the engine write the spans. Groups with the same prompt share its export."""
        exports, requests, turn = list[Export](), list[SampleRequest](), TimeSlice()
        for span in spans:
            owner, first = owner_of(rollout.id), span.first
            export = self._exports.begin(owner, span.token_ids, begun, first)
            exports.append(export)
            if export.export_slot is not None:
                requests.append(_request(group, span, export.export_slot))
            await turn.pause()
        await self._exports.write(requests, exports)
        return list(zip(spans, exports, strict=True))


def _now() -> float:
    return asyncio.get_running_loop().time()


def _is_of_version(part: SampleAnswer, version: str) -> bool:
    """True if the KV that the next token would attend to is of this version."""
    first = max((span.first_token for span in part.kv_versions), default=0)
    return all(span.version == version for span in part.kv_versions if span.first_token == first)


def _spans(group: Group, block_size: int) -> tuple[Span | None, list[Span | None]]:
    """Span of the prompt that the samples share, and a span per sample, each if there is one.

    The KV of a sample without a token may not have been computed.
    """
    prompt, parts = group.options.prompt_token_ids, group.suspended
    with_kv = [part for part in parts if len(part.token_ids)]
    if not with_kv:
        return None, [None] * len(parts)
    first = len(prompt) // block_size * block_size if len(parts) > 1 else 0
    ends = [(len(prompt) + len(each.token_ids) - 1) // block_size * block_size for each in parts]
    own = [
        _span(group, part, first, end) if end > first and len(part.token_ids) else None
        for part, end in zip(parts, ends, strict=True)
    ]
    return _span(group, with_kv[0], 0, first) if first else None, own


def _span(group: Group, part: SampleAnswer, first: int, end: int) -> Span:
    load = group.loads.get(part.index)
    chain = None if load is None else load.of_chain
    return Span(group.options.prompt_token_ids, part.token_ids, first, end, chain)


def _request(group: Group, span: Span, slot: ExportSlot) -> SampleRequest:
    """Request that prefills the token after a span, and exports the span."""
    return SampleRequest(
        id=uuid.uuid4().hex,
        prompt_token_ids=span.token_ids,
        sampling=PREFILL_ONLY,
        priority=group.options.priority,
        cache_salt=group.options.cache_salt,
        group=group.name,
        adapter=group.options.adapter,
        speculation=False,
        load=span.load,
        export=slot,
    )

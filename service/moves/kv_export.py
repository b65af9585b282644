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
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from coppice.prompt_kv.host import read_boot_id
from coppice.wire.moves import MovedGroupKv, MovedKv, MovedSpan
from coppice.wire.rollouts import SampleAnswer
from engine.errors import EngineError
from engine.kv_types import ExportSlot, KvLoad
from engine.protocol import Engine
from engine.types import SampleRequest, Sampling
from service.prompt_kv.exports import Export
from service.prompt_kv.manager import PromptKvManager
from service.rollouts.fairness import TimeSlice
from service.rollouts.group import Group
from service.rollouts.rollout import Rollout
from service.trees.tree_group import TreeGroup

KvMoveOutcome = Literal[
    "loaded",
    "disabled",
    "other_version",
    "tree",
    "too_small",
    "too_large",
    "no_room",
    "timeout",
    "failed",
]
"""`loaded`, or the reason for which a moved sample is prefilled."""
OnKvMoved = Callable[[KvMoveOutcome, int], None]
"""Receives what happened to the KV of moved samples, and their number."""
log = logging.getLogger(__name__)

_OWNER = "moves/"
PREFILL_ONLY = Sampling(max_tokens=1, temperature=0.0)
LEASE_SECONDS = 60.0
MAX_TIME_SHARE = 0.5
"""Share of the time that is left for moves, in which KV is exported."""


class KvUnavailable(Exception):
    """The samples of a group are moved without their KV."""

    def __init__(self, outcome: KvMoveOutcome) -> None:
        super().__init__(outcome)
        self.outcome: KvMoveOutcome = outcome


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


def owner_of(rollout_id: str) -> str:
    """Owner of the handles of a rollout's KV, which no API key has as its name."""
    return f"{_OWNER}{rollout_id}"


def is_of_move(owner: str) -> bool:
    """True for the owner of handles of a rollout's KV."""
    return owner.startswith(_OWNER)


class KvExporter:
    """Exports the KV of suspended rollouts.

    `bytes_per_second` is the assumed rate at which KV is copied to another replica; 0: none is.
    `on_prefilled` is called with the number of samples that are moved without their KV.
    """

    def __init__(
        self,
        engine: Engine,
        prompt_kv: PromptKvManager,
        *,
        bytes_per_second: float,
        on_prefilled: OnKvMoved,
    ) -> None:
        self._engine = engine
        self._prompt_kv = prompt_kv
        self._bytes_per_second = bytes_per_second
        self._on_prefilled = on_prefilled
        self._boot_id = read_boot_id()
        self._busy_until = 0.0

    @asynccontextmanager
    async def exported(
        self, rollout: Rollout, version: str, until: float
    ) -> AsyncIterator[MovedKv | None]:
        """Context manager in which other replicas can fetch the KV of a suspended rollout.

        None if no KV was exported by `until`, of which it uses only a part.
        """
        exports = list[Export]()
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
                    tasks.create_task(self._try_group(rollout, group, version, ends_at, exports))
                    for group in groups
                ]
            found = [kv for task in work if (kv := task.result()) is not None]
            yield self._moved_kv(found, MAX_TIME_SHARE * (until - _now())) if found else None
        finally:
            for export in exports:
                self._release(export)

    def _moved_kv(self, groups: list[MovedGroupKv], seconds: float) -> MovedKv:
        assert self._prompt_kv.arena is not None, "KV was exported to it"
        return MovedKv.model_construct(
            boot_id=self._boot_id,
            arena=str(self._prompt_kv.arena.path),
            seconds=max(seconds, 0.0),
            groups=groups,
        )

    async def _try_group(
        self, rollout: Rollout, group: Group, version: str, ends_at: float, exports: list[Export]
    ) -> MovedGroupKv | None:
        outcome: KvMoveOutcome = "failed"
        try:
            async with asyncio.timeout_at(ends_at):
                return await self._export(rollout, group, version, ends_at, exports)
        except KvUnavailable as error:
            outcome = error.outcome
        except TimeoutError:
            outcome = "timeout"
        except EngineError as error:
            log.warning("the KV of a moved rollout was not exported: %s", type(error).__name__)
        self._on_prefilled(outcome, len(group.suspended))
        return None

    async def _export(
        self, rollout: Rollout, group: Group, version: str, ends_at: float, exports: list[Export]
    ) -> MovedGroupKv:
        self._check(group, version)
        prompt, own = _spans(group, self._engine.info.block_size)
        spans = [span for span in (prompt, *own) if span is not None]
        self._reserve_time(sum(span.end - span.first for span in spans), ends_at)
        begun, turn = dict[Span, Export](), TimeSlice()
        for span in spans:
            begun[span] = self._begin(rollout, span, exports)
            await turn.pause()
        await self._write(group, begun)
        moved = {span: self._moved_span(span, export) for span, export in begun.items()}
        return MovedGroupKv.model_construct(
            index=group.options.index,
            prompt=None if prompt is None else moved[prompt],
            samples=[None if span is None else moved[span] for span in own],
        )

    def _check(self, group: Group, version: str) -> None:
        """Raise KvUnavailable if the group's KV cannot be loaded by another replica."""
        kv_format = self._engine.info.kv_format
        if not self._bytes_per_second or self._prompt_kv.reason is not None:
            raise KvUnavailable("disabled")
        if kv_format is None or kv_format.layers:
            raise KvUnavailable("disabled")
        if not all(_is_of_version(part, version) for part in group.suspended):
            raise KvUnavailable("other_version")

    def _reserve_time(self, num_tokens: int, ends_at: float) -> None:
        """Reserve the time to copy these tokens' KV after that of other groups."""
        if not num_tokens:
            raise KvUnavailable("too_small")
        num_bytes = num_tokens * self._engine.info.kv_bytes_per_token
        until = max(_now(), self._busy_until) + num_bytes / self._bytes_per_second
        if until > ends_at:
            raise KvUnavailable("too_large")
        self._busy_until = until

    def _begin(self, rollout: Rollout, span: Span, exports: list[Export]) -> Export:
        export = self._prompt_kv.begin(
            owner_of(rollout.id), span.token_ids, LEASE_SECONDS, span.first
        )
        exports.append(export)
        if export.ended.is_set() and export.handle is None:
            raise KvUnavailable("no_room")
        return export

    async def _write(self, group: Group, exports: Mapping[Span, Export]) -> None:
        """Have the engine write the exports. Groups with the same prompt share its export."""
        requests, turn = list[SampleRequest](), TimeSlice()
        for span, export in exports.items():
            if export.export_slot is not None:
                requests.append(_request(group, span, export.export_slot))
                await turn.pause()
        try:
            for completion in await self._engine.submit(requests):
                await completion
        finally:
            await self._engine.abort([request.id for request in requests])
        for export in exports.values():
            if export.is_writer:
                await self._prompt_kv.finish(export)
        for export in exports.values():
            await export.ended.wait()

    def _moved_span(self, span: Span, export: Export) -> MovedSpan:
        handle = export.handle
        if handle is None:
            raise KvUnavailable("failed")
        handle.start_lease()
        return MovedSpan.model_construct(
            handle=handle.id,
            start=span.first,
            num_tokens=handle.slot.layout.num_tokens,
            num_bytes=handle.slot.layout.file_bytes,
            offset=handle.slot.file_offset,
        )

    def _release(self, export: Export) -> None:
        if export.handle is not None:
            self._prompt_kv.handles.end(export.handle)
        else:
            self._prompt_kv.abandon(export)


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

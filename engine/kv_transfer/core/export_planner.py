"""Scheduler side of prompt KV exports in EngineCore: choice of prompts, held blocks.

A prompt is exported after the step that prefills the last token to export. Its blocks are held, as
the workers read them while later steps run. Its KV belongs to one epoch, the time between two
activations, or is mixed. A request starts over when it is scheduled for the first time or after a
preemption, and then matches no block of an earlier epoch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from engine.kv_transfer.cache_layout import CacheLayout
from engine.kv_transfer.jobs import PromptExport
from engine.types.kv import ExportSlot, ExportStatus

NULL_BLOCK: Final = 0
"""Block id in place of a block that vLLM has freed, as it is outside of a sliding window."""


@dataclass(slots=True)
class Tracked:
    target_slot: ExportSlot
    epoch: int | None = None


class ExportPlanner:
    """Tracks prompts to export until a step completes them. Called from EngineCore's loop only.

    `on_exported` receives the names of exports computed under one weights version.
    """

    def __init__(
        self, layouts: Sequence[CacheLayout], *, on_exported: Callable[[str], None]
    ) -> None:
        """Create a planner, which tracks nothing if there are no layouts."""
        self._layouts = layouts
        self._on_exported = on_exported
        self._epoch = 0
        self._tracked: dict[str, Tracked] = {}

    @property
    def num_tracked(self) -> int:
        return len(self._tracked)

    def add(self, request_id: str, target_slot: ExportSlot | None) -> None:
        if target_slot is not None and self._layouts:
            self._tracked[request_id] = Tracked(target_slot)

    def forget(self, request_id: str) -> None:
        """Stop tracking a finished request. A prompt that is not exported by now never will be."""
        self._tracked.pop(request_id, None)

    def start_epoch(self) -> None:
        self._epoch += 1

    def plan(self, output: Any) -> tuple[PromptExport, ...]:
        """Exports of the prompts that the step of a scheduler output completes."""
        return tuple(self._plan_exports(output)) if self._tracked else ()

    def _plan_exports(self, output: Any) -> Iterator[PromptExport]:
        for request_id, num_computed, is_new in _scheduled_requests(output):
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            if is_new:
                tracked.epoch = self._epoch
            after = num_computed + output.num_scheduled_tokens[request_id]
            if after >= tracked.target_slot.num_tokens:
                del self._tracked[request_id]
                yield self._make_export(
                    tracked, output.kv_connector_block_state.get_block_ids(request_id)
                )

    def _make_export(self, tracked: Tracked, block_ids: Any) -> PromptExport:
        slot = tracked.target_slot
        # Layers of one group have the same blocks, even if their shapes differ.
        blocks = {
            layout.group: _stored_blocks(layout, block_ids[layout.group], slot.num_tokens)
            for layout in self._layouts
        }
        status = ExportStatus.COMMITTED
        if tracked.epoch != self._epoch:
            status = ExportStatus.MIXED_VERSION
        elif any(NULL_BLOCK in ids for ids in blocks.values()):
            status = ExportStatus.FAILED
        elif slot.name is not None:
            self._on_exported(slot.name)
        return PromptExport(target_slot=slot, block_ids=blocks, status=status)


class HeldBlocks:
    """References to the blocks of exports that have not ended, so that vLLM does not reuse them.

    A request may finish, be preempted, or slide its window while its prompt is copied. An export is
    released when all ranks have reported its end. Called from EngineCore's loop only.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._pool: Any = None
        self._held: dict[int, list[Any]] = {}
        self._remaining: dict[int, int] = {}
        self._next = 0

    def __bool__(self) -> bool:
        return bool(self._held)

    @property
    def has_pending_frees(self) -> bool:
        """True if the end of an export will free a block: no request has the block any more."""
        return any(block.ref_cnt == 1 for blocks in self._held.values() for block in blocks)

    def bind(self, pool: Any) -> None:
        self._pool = pool

    def hold(self, export: PromptExport) -> PromptExport:
        """Reference the blocks of an export, and number it."""
        assert self._pool is not None, "the pool is bound before a request is scheduled"
        ids = dict.fromkeys(block for blocks in export.block_ids.values() for block in blocks)
        ids.pop(NULL_BLOCK, None)
        number, self._next = self._next, self._next + 1
        self._held[number] = [self._pool.blocks[block] for block in ids]
        self._remaining[number] = self._num_ranks
        self._pool.touch(self._held[number])
        return replace(export, number=number)

    def on_ended(self, num_ranks: Mapping[int, int]) -> None:
        for number, count in num_ranks.items():
            self._remaining[number] -= count
            if not self._remaining[number]:
                del self._remaining[number]
                self._pool.free_blocks(reversed(self._held.pop(number)))


def _stored_blocks(
    layout: CacheLayout, block_ids: Sequence[int], num_tokens: int
) -> tuple[int, ...]:
    """Blocks with the tokens that an export of `num_tokens` tokens stores."""
    first = layout.first_token(num_tokens) // layout.block_size
    return tuple(block_ids[first : -(-num_tokens // layout.block_size)])


def _scheduled_requests(output: Any) -> Iterator[tuple[str, int, bool]]:
    """Id, tokens computed before this step and whether it (re)starts, per scheduled request."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens, True
    cached = output.scheduled_cached_reqs
    for request_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield request_id, num_computed, request_id in cached.resumed_req_ids

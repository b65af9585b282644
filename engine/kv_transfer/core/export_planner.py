"""Plans exports in EngineCore: which prompts a step completes, and under which weights.

A prompt is exported in the step that prefills the last token to export, so no block has to outlive
its request. Its KV belongs to one epoch, the time between two activations, or is mixed. A request
starts over when it is scheduled for the first time or after a preemption, and then matches no block
of an earlier epoch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from engine.kv_transfer.cache_layout import CacheLayout
from engine.kv_transfer.jobs import ExportJob
from engine.kv_types import ExportSlot, ExportStatus


@dataclass(slots=True)
class Tracked:
    target_slot: ExportSlot
    epoch: int | None = None


class ExportPlanner:
    """Tracks prompts to export until a step completes them. Called from EngineCore's loop only.

    `on_exported` receives the names of exports computed under one weights version.
    """

    def __init__(self, layout: CacheLayout | None, *, on_exported: Callable[[str], None]) -> None:
        self._layout = layout
        self._on_exported = on_exported
        self._epoch = 0
        self._tracked: dict[str, Tracked] = {}

    @property
    def num_tracked(self) -> int:
        return len(self._tracked)

    def add(self, request_id: str, target_slot: ExportSlot | None) -> None:
        if target_slot is not None and self._layout is not None:
            self._tracked[request_id] = Tracked(target_slot)

    def forget(self, request_id: str) -> None:
        """Stop tracking a finished request. A prompt that is not exported by now never will be."""
        self._tracked.pop(request_id, None)

    def start_epoch(self) -> None:
        self._epoch += 1

    def plan(self, output: Any) -> tuple[ExportJob, ...]:
        """Export jobs of the step that vLLM's scheduler output describes."""
        return tuple(self._plan_jobs(output)) if self._tracked else ()

    def _plan_jobs(self, output: Any) -> Iterator[ExportJob]:
        for request_id, num_computed, is_new in _scheduled_requests(output):
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            if is_new:
                tracked.epoch = self._epoch
            after = num_computed + output.num_scheduled_tokens[request_id]
            if after >= tracked.target_slot.num_tokens:
                del self._tracked[request_id]
                yield self._make_job(
                    tracked, output.kv_connector_block_state.get_block_ids(request_id)
                )

    def _make_job(self, tracked: Tracked, block_ids: Any) -> ExportJob:
        assert self._layout is not None, "only supported caches are tracked"
        target_slot = tracked.target_slot
        num_blocks = -(-target_slot.num_tokens // self._layout.block_size)
        is_mixed = tracked.epoch != self._epoch
        if target_slot.name is not None and not is_mixed:
            self._on_exported(target_slot.name)
        return ExportJob(
            target_slot=target_slot,
            block_ids=tuple(block_ids[self._layout.group][:num_blocks]),
            status=ExportStatus.MIXED_VERSION if is_mixed else ExportStatus.COMMITTED,
        )


def _scheduled_requests(output: Any) -> Iterator[tuple[str, int, bool]]:
    """Id, tokens computed before this step and whether it (re)starts, per scheduled request."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens, True
    cached = output.scheduled_cached_reqs
    for request_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield request_id, num_computed, request_id in cached.resumed_req_ids

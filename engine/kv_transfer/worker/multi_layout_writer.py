"""Prompt KV export for models with several KV cache layouts (full and sliding window).

Each layout has a writer of its own, which fills the layout's region of the slot. The last one to
end writes the status.
"""

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.kv_transfer.cache_layout import CacheLayout, split_slot
from engine.kv_transfer.jobs import ExportJob, PromptExport
from engine.kv_transfer.worker.export_writer import EXPORT_FEATURE, ExportWriter
from engine.kv_transfer.worker.gpu_arena import GpuArena
from engine.runtime.feature_guard import Feature, attempt
from engine.types.kv import ExportStatus


class PromptStatuses:
    """Statuses of the regions of unfinished exports. Copies may end in several threads."""

    def __init__(self, num_regions: int) -> None:
        self._num_regions = num_regions
        self._lock = threading.Lock()
        self._known: dict[tuple[Path, int], list[ExportStatus]] = {}
        self._ended: Counter[int] = Counter()

    def add(self, job: ExportJob, status: ExportStatus) -> ExportStatus | None:
        """Record the status of one region; returns that of the prompt after the last one.

        Statuses of higher value count more: a prompt is committed if all of its regions are.
        """
        slot = job.target_slot
        with self._lock:
            known = self._known.setdefault((slot.arena, slot.status_offset), [])
            known.append(status)
            if len(known) < self._num_regions:
                return None
            del self._known[slot.arena, slot.status_offset]
        return max(known)

    def end(self, job: ExportJob) -> None:
        """Record that the blocks of a prompt are not read any more."""
        if job.number is not None:
            with self._lock:
                self._ended[job.number] += 1

    def take_ended(self) -> Counter[int]:
        with self._lock:
            ended, self._ended = self._ended, Counter()
        return ended


class RegionWriter(ExportWriter):
    """Writes one region of exported prompts."""

    def __init__(
        self, layout: CacheLayout, rank: int, guard: Feature, statuses: PromptStatuses
    ) -> None:
        super().__init__(layout, rank, guard)
        self._statuses = statuses

    def _write_status(self, job: ExportJob, status: ExportStatus) -> None:
        final = self._statuses.add(job, status)
        if final is not None:
            # A failure must not reach `fail`, which would record a status of the next export.
            attempt(super()._write_status, job, final)
            self._statuses.end(job)


class PromptWriter:
    """Writes this rank's part of prompt KV exports. Called from the worker's main thread."""

    def __init__(
        self, layouts: Sequence[CacheLayout], rank: int, guard: Feature = EXPORT_FEATURE
    ) -> None:
        self._statuses = PromptStatuses(len(layouts))
        self._layouts = layouts
        self.gpu_arena: GpuArena | None = None
        self.gpu_arena_failure: str | None = None
        self.writers = [RegionWriter(layout, rank, guard, self._statuses) for layout in layouts]

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        for writer in self.writers:
            writer.register(caches)

    def prepare(self, attention_layers: Mapping[str, Any], *, gpu_bytes: int = 0) -> None:
        """Create the block readers; see ExportWriter. Only plain KV can stay in GPU memory."""
        is_plain = len(self._layouts) == 1 and self._layouts[0].window is None
        for writer in self.writers:
            writer.prepare(attention_layers, gpu_bytes=gpu_bytes if is_plain else 0)
        self.gpu_arena = self.writers[0].gpu_arena
        self.gpu_arena_failure = self.writers[0].gpu_arena_failure
        if gpu_bytes and not is_plain:
            self.gpu_arena_failure = "layers have sliding windows, or keys of different shapes"

    @property
    def indirect_reason(self) -> str | None:
        return next(filter(None, (writer.indirect_reason for writer in self.writers)), None)

    def export(self, export: PromptExport) -> None:
        for writer, job in zip(self.writers, self.jobs(export), strict=True):
            writer.export(job)

    def fail(self, export: PromptExport) -> None:
        for writer, job in zip(self.writers, self.jobs(export), strict=True):
            writer.fail(job)

    def jobs(self, export: PromptExport) -> list[ExportJob]:
        """The job of each writer."""
        parts = split_slot(self._layouts, export.target_slot)
        return [
            ExportJob(
                target_slot=part,
                block_ids=export.block_ids[layout.group],
                status=export.status,
                number=export.number,
            )
            for layout, part in zip(self._layouts, parts, strict=True)
        ]

    def take_ended(self) -> Counter[int]:
        """Return and clear the numbers of exports that have ended since the last call."""
        return self._statuses.take_ended()

    def flush(self) -> None:
        for writer in self.writers:
            writer.flush()

    def close(self) -> None:
        for writer in self.writers:
            writer.close()

"""Connector metadata of a step: KV export and load jobs from EngineCore to the workers."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from engine.types.kv import ExportSlot, ExportStatus, LoadPiece


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptExport:
    """Export of a prompt whose blocks are complete after this step's forward pass.

    `block_ids` are, per KV cache group, the blocks of the tokens to export. `status` is the status
    to write if the export succeeds. `number` identifies its blocks, which EngineCore holds.
    """

    target_slot: ExportSlot
    block_ids: Mapping[int, tuple[int, ...]]
    status: ExportStatus
    number: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportJob:
    """Export of those layers of a prompt that have one cache layout."""

    target_slot: ExportSlot
    block_ids: tuple[int, ...]
    status: ExportStatus
    number: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadJob:
    """Consecutive spans of a prompt whose KV is loaded before the step's forward pass.

    The blocks are filled from the first token of the first span on.
    """

    pieces: tuple[LoadPiece, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepJobs(KVConnectorMetadata):  # type: ignore[misc]
    exports: tuple[PromptExport, ...] = ()
    loads: tuple[LoadJob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedExports(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Numbers of exports that have ended, with the number of ranks on which they have."""

    num_ranks: Counter[int]

    def aggregate(self, other: Any) -> "EndedExports":
        return EndedExports(num_ranks=self.num_ranks + other.num_ranks)

"""What the scheduler's side of the connector tells the workers' side in a step."""

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from engine.kv_transfer.params import ExportSlotParams, LoadPieceParams
from engine.kv_types import ExportStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportJob:
    """Tokens whose blocks are complete after this step's forward; `status` is what to say of
    them."""

    target_slot: ExportSlotParams
    block_ids: tuple[int, ...]
    status: ExportStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadJob:
    """Pieces that follow one another, and fill blocks from the first token of the first on, before
    the forward."""

    pieces: tuple[LoadPieceParams, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepJobs(KVConnectorMetadata):  # type: ignore[misc]
    exports: tuple[ExportJob, ...] = ()
    loads: tuple[LoadJob, ...] = ()

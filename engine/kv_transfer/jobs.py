"""What the scheduler's side of the connector tells the workers' side in a step."""

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from engine.kv_transfer.params import Piece, Place
from engine.kv_types import ExportWord


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportJob:
    """Tokens whose blocks are complete after this step's forward; `word` is what to say of them."""

    place: Place
    block_ids: tuple[int, ...]
    word: ExportWord


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadJob:
    """Pieces that follow one another, and fill blocks from the first token of the first on, before
    the forward."""

    pieces: tuple[Piece, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepJobs(KVConnectorMetadata):  # type: ignore[misc]
    exports: tuple[ExportJob, ...] = ()
    loads: tuple[LoadJob, ...] = ()

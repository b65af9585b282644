"""What the scheduler's side of the connector tells the workers' side in a step."""

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from engine.kv.place import Place
from engine.protocol import ExportWord


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportJob:
    """A prompt whose blocks are complete after this step's forward; `word` is what to say of it."""

    place: Place
    block_ids: tuple[int, ...]
    word: ExportWord


@dataclass(frozen=True, slots=True)
class ExportJobs(KVConnectorMetadata):  # type: ignore[misc]
    jobs: tuple[ExportJob, ...] = ()

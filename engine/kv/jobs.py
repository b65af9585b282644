"""What the scheduler's side of the connector tells the workers' side in a step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from engine.protocol import ExportSlot, ExportWord

PARAMETER: Final = "coppice_export"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An ExportSlot as plain values, which a sample's parameters can carry to EngineCore."""

    arena: str
    offset: int
    words_offset: int
    num_tokens: int

    @classmethod
    def carried(cls, parameters: Mapping[str, Any] | None) -> Self | None:
        found = (parameters or {}).get(PARAMETER)
        return None if found is None else cls(**found)


def carrying(slot: ExportSlot) -> dict[str, Any]:
    """The parameters of a sample that `carried` reads."""
    return {
        PARAMETER: {
            "arena": str(slot.arena),
            "offset": slot.offset,
            "words_offset": slot.words_offset,
            "num_tokens": slot.num_tokens,
        }
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportJob:
    """A prompt whose blocks are complete after this step's forward; `word` is what to say of it."""

    place: Place
    block_ids: tuple[int, ...]
    word: ExportWord


@dataclass(frozen=True, slots=True)
class ExportJobs(KVConnectorMetadata):  # type: ignore[misc]
    jobs: tuple[ExportJob, ...] = ()

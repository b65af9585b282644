"""Where an export goes, on its way from a sample to EngineCore: plain values in its parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from engine.protocol import ExportSlot

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

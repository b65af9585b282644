"""Where an export goes, and what is loaded from where, on their way from a sample to EngineCore:
plain values in its parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from engine.protocol import ExportSlot, Load, LoadPiece

PARAMETER: Final = "coppice_export"
LOAD_PARAMETER: Final = "coppice_load"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An ExportSlot as plain values, which a sample's parameters can carry to EngineCore."""

    arena: str
    offset: int
    words_offset: int
    num_tokens: int
    name: str | None = None

    @classmethod
    def carried(cls, parameters: Mapping[str, Any] | None) -> Self | None:
        found = (parameters or {}).get(PARAMETER)
        return None if found is None else cls(**found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A LoadPiece as plain values: the source's place, and what is taken of it."""

    source: Place
    skip: int
    num_tokens: int
    start: int
    shift: int

    @property
    def end(self) -> int:
        """One past its last token, in the prompt."""
        return self.start + self.num_tokens

    def behind(self, position: int) -> Self:
        """What of it stands in the prompt from there on."""
        return replace(
            self,
            skip=self.skip + position - self.start,
            num_tokens=self.end - position,
            start=position,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """A Load as plain values."""

    chain: str
    num_requests: int
    pieces: tuple[Piece, ...]

    @classmethod
    def carried(cls, parameters: Mapping[str, Any] | None) -> Self | None:
        found = (parameters or {}).get(LOAD_PARAMETER)
        if found is None:
            return None
        pieces = (
            Piece(**{**piece, "source": Place(**piece["source"])}) for piece in found["pieces"]
        )
        return cls(**{**found, "pieces": tuple(pieces)})


def carrying(slot: ExportSlot | None, load: Load | None = None) -> dict[str, Any]:
    """The parameters of a sample that the two `carried` read."""
    carried: dict[str, Any] = {}
    if slot is not None:
        carried[PARAMETER] = _plain(slot)
    if load is not None:
        carried[LOAD_PARAMETER] = {
            "chain": load.chain,
            "num_requests": load.num_requests,
            "pieces": [_plain_piece(piece) for piece in load.pieces],
        }
    return carried


def _plain(slot: ExportSlot) -> dict[str, Any]:
    return {
        "arena": str(slot.arena),
        "offset": slot.offset,
        "words_offset": slot.words_offset,
        "num_tokens": slot.num_tokens,
        "name": slot.name,
    }


def _plain_piece(piece: LoadPiece) -> dict[str, Any]:
    return {
        "source": _plain(piece.source),
        "skip": piece.skip,
        "num_tokens": piece.num_tokens,
        "start": piece.start,
        "shift": piece.shift,
    }

"""Where an export goes, and what is loaded from where, on their way from a sample to EngineCore:
plain values in its parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass
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
    first: int = 0
    name: str | None = None

    @property
    def end(self) -> int:
        """One past the last token of the prompt that is exported."""
        return self.first + self.num_tokens

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
    shift: int

    def part(self, start: int, end: int) -> Self:
        """Its own tokens start..end (end excluded)."""
        return type(self)(
            source=self.source, skip=self.skip + start, num_tokens=end - start, shift=self.shift
        )


def carried_pieces(parameters: Mapping[str, Any] | None) -> tuple[Piece, ...]:
    found = (parameters or {}).get(LOAD_PARAMETER) or ()
    return tuple(
        Piece(source=Place(**piece["source"]), **{k: piece[k] for k in _NUMBERS}) for piece in found
    )


def carrying(slot: ExportSlot | None, load: Load | None = None) -> dict[str, Any]:
    """The parameters of a sample that `carried` and `carried_pieces` read."""
    carried: dict[str, Any] = {}
    if slot is not None:
        carried[PARAMETER] = _plain(slot)
    if load is not None:
        carried[LOAD_PARAMETER] = [_plain_piece(piece) for piece in load.pieces]
    return carried


_NUMBERS: Final = ("skip", "num_tokens", "shift")


def _plain(slot: ExportSlot) -> dict[str, Any]:
    return {
        "arena": str(slot.arena),
        "offset": slot.offset,
        "words_offset": slot.words_offset,
        "num_tokens": slot.num_tokens,
        "first": slot.first,
        "name": slot.name,
    }


def _plain_piece(piece: LoadPiece) -> dict[str, Any]:
    numbers = {name: getattr(piece, name) for name in _NUMBERS}
    return {"source": _plain(piece.source), **numbers}

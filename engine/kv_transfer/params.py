"""Where an export goes, and what is loaded from where, on their way from a sample to EngineCore:
plain values in its parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from engine.kv_types import ExportSlot, Load, LoadPiece, Observed

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
class Seen:
    """An Observed as plain values."""

    real: Place
    skip: int
    shift: int
    base: Place | None
    base_skip: int
    weight: float

    @property
    def names(self) -> tuple[str | None, ...]:
        return (self.real.name,) if self.base is None else (self.real.name, self.base.name)

    def later(self, num_tokens: int) -> Self:
        return replace(self, skip=self.skip + num_tokens, base_skip=self.base_skip + num_tokens)

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Self:
        base = found["base"]
        places = {
            "real": Place(**found["real"]),
            "base": None if base is None else Place(**base),
        }
        return cls(**{**found, **places})


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A LoadPiece as plain values: the source's place, and what is taken of it."""

    source: Place
    skip: int
    num_tokens: int
    start: int
    shift: int
    observed: tuple[Seen, ...] = ()

    @property
    def end(self) -> int:
        """One past its last token, in the prompt."""
        return self.start + self.num_tokens

    @property
    def names(self) -> tuple[str | None, ...]:
        """Of all that it is made from."""
        return (self.source.name, *(name for seen in self.observed for name in seen.names))

    def behind(self, position: int) -> Self:
        """What of it stands in the prompt from there on."""
        num_less = position - self.start
        return replace(
            self,
            skip=self.skip + num_less,
            num_tokens=self.num_tokens - num_less,
            start=position,
            observed=tuple(seen.later(num_less) for seen in self.observed),
        )

    def before(self, position: int) -> Self:
        """What of it stands in the prompt up to there."""
        return replace(self, num_tokens=position - self.start)

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Self:
        observed = tuple(Seen.of(seen) for seen in found["observed"])
        return cls(**{**found, "source": Place(**found["source"]), "observed": observed})


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """A Load as plain values."""

    chain: str
    num_requests: int
    exact_tokens: int
    pieces: tuple[Piece, ...]

    @classmethod
    def carried(cls, parameters: Mapping[str, Any] | None) -> Self | None:
        found = (parameters or {}).get(LOAD_PARAMETER)
        if found is None:
            return None
        return cls(**{**found, "pieces": tuple(Piece.of(piece) for piece in found["pieces"])})


def carrying(slot: ExportSlot | None, load: Load | None = None) -> dict[str, Any]:
    """The parameters of a sample that the two `carried` read."""
    carried: dict[str, Any] = {}
    if slot is not None:
        carried[PARAMETER] = _plain(slot)
    if load is not None:
        carried[LOAD_PARAMETER] = {
            "chain": load.chain,
            "num_requests": load.num_requests,
            "exact_tokens": load.exact_tokens,
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
        "observed": [_plain_observed(observed) for observed in piece.observed],
    }


def _plain_observed(observed: Observed) -> dict[str, Any]:
    return {
        "real": _plain(observed.real),
        "skip": observed.skip,
        "shift": observed.shift,
        "base": None if observed.base is None else _plain(observed.base),
        "base_skip": observed.base_skip,
        "weight": observed.weight,
    }

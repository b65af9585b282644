"""Serialised exports and loads: plain values in a sample's parameters, sent to EngineCore."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from engine.kv_types import ExportSlot, KvLoad, LoadPiece, ObservedKv

EXPORT_PARAM: Final = "coppice_export"
LOAD_PARAM: Final = "coppice_load"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSlotParams:
    """An ExportSlot as plain values for a sample's parameters."""

    arena: str
    offset: int
    status_offset: int
    num_tokens: int
    name: str | None = None

    @classmethod
    def from_params(cls, parameters: Mapping[str, Any] | None) -> Self | None:
        found = (parameters or {}).get(EXPORT_PARAM)
        return None if found is None else cls(**found)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedKvParams:
    """An ObservedKv as plain values."""

    real: ExportSlotParams
    token_offset: int
    shift: int
    base: ExportSlotParams | None
    base_token_offset: int
    weight: float

    @property
    def names(self) -> tuple[str | None, ...]:
        return (self.real.name,) if self.base is None else (self.real.name, self.base.name)

    def advanced(self, num_tokens: int) -> Self:
        return replace(
            self,
            token_offset=self.token_offset + num_tokens,
            base_token_offset=self.base_token_offset + num_tokens,
        )

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Self:
        base = found["base"]
        places = {
            "real": ExportSlotParams(**found["real"]),
            "base": None if base is None else ExportSlotParams(**base),
        }
        return cls(**{**found, **places})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPieceParams:
    """A LoadPiece as plain values."""

    source: ExportSlotParams
    token_offset: int
    num_tokens: int
    start: int
    shift: int
    observations: tuple[ObservedKvParams, ...] = ()

    @property
    def end(self) -> int:
        """Position in the prompt after its last token."""
        return self.start + self.num_tokens

    @property
    def names(self) -> tuple[str | None, ...]:
        """Names of all exports that it is made from."""
        return (self.source.name, *(name for seen in self.observations for name in seen.names))

    def suffix_from(self, position: int) -> Self:
        """The part from this position of the prompt on."""
        num_skipped = position - self.start
        return replace(
            self,
            token_offset=self.token_offset + num_skipped,
            num_tokens=self.num_tokens - num_skipped,
            start=position,
            observations=tuple(seen.advanced(num_skipped) for seen in self.observations),
        )

    def prefix_until(self, position: int) -> Self:
        """The part before this position of the prompt."""
        return replace(self, num_tokens=position - self.start)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Self:
        observations = tuple(ObservedKvParams.from_dict(seen) for seen in found["observations"])
        return cls(
            **{**found, "source": ExportSlotParams(**found["source"]), "observations": observations}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLoadParams:
    """A KvLoad as plain values."""

    chain: str
    num_requests: int
    exact_tokens: int
    pieces: tuple[LoadPieceParams, ...]

    @classmethod
    def from_params(cls, parameters: Mapping[str, Any] | None) -> Self | None:
        found = (parameters or {}).get(LOAD_PARAM)
        if found is None:
            return None
        return cls(
            **{
                **found,
                "pieces": tuple(LoadPieceParams.from_dict(piece) for piece in found["pieces"]),
            }
        )


def to_params(slot: ExportSlot | None, load: KvLoad | None = None) -> dict[str, Any]:
    """The sample parameters that the two `params` parse."""
    params: dict[str, Any] = {}
    if slot is not None:
        params[EXPORT_PARAM] = _slot_to_dict(slot)
    if load is not None:
        params[LOAD_PARAM] = {
            "chain": load.chain,
            "num_requests": load.num_requests,
            "exact_tokens": load.exact_tokens,
            "pieces": [_piece_to_dict(piece) for piece in load.pieces],
        }
    return params


def _slot_to_dict(slot: ExportSlot) -> dict[str, Any]:
    return {
        "arena": str(slot.arena),
        "offset": slot.offset,
        "status_offset": slot.status_offset,
        "num_tokens": slot.num_tokens,
        "name": slot.name,
    }


def _piece_to_dict(piece: LoadPiece) -> dict[str, Any]:
    return {
        "source": _slot_to_dict(piece.source),
        "token_offset": piece.token_offset,
        "num_tokens": piece.num_tokens,
        "start": piece.start,
        "shift": piece.shift,
        "observations": [_observed_to_dict(observed) for observed in piece.observations],
    }


def _observed_to_dict(observed: ObservedKv) -> dict[str, Any]:
    return {
        "real": _slot_to_dict(observed.real),
        "token_offset": observed.token_offset,
        "shift": observed.shift,
        "base": None if observed.base is None else _slot_to_dict(observed.base),
        "base_token_offset": observed.base_token_offset,
        "weight": observed.weight,
    }

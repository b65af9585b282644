"""Data types for prompt KV transfer: KV formats, export slots, parts to load.

`to_dict` and `from_dict` convert them to and from the plain values that reach EngineCore as a
request's `kv_transfer_params`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal, Self


class ExportStatus(IntEnum):
    """Result of a prompt KV export on one rank, which writes it once, after the KV bytes."""

    PENDING = 0
    COMMITTED = 1
    MIXED_VERSION = 2
    FAILED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFormat:
    """Shape of one layer's keys and values in exported prompt KV, and the region that has them.

    A layer with a sliding `window` stores only the tokens that a later token reads, from the last
    multiple of `block_size` on that precedes them.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    block_size: int = 1
    region: int = 0

    def first_token(self, num_tokens: int) -> int:
        """First stored token of a prompt of which `num_tokens` tokens are exported."""
        return first_stored_token(num_tokens, self.window, self.block_size)


def first_stored_token(num_tokens: int, window: int | None, block_size: int) -> int:
    if window is None:
        return 0
    return max(0, num_tokens - window + 1) // block_size * block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFormat:
    """Canonical layout of exported prompt KV.

    For each layer in order, K then V, each [kv_heads, tokens, head_dim], C-contiguous, without
    padding. Keys are stored after rotary embedding. `not_movable` is the reason why keys cannot be
    shifted to other positions, if they cannot.

    `layers` is empty if all layers have the same shape and store all tokens. Otherwise it has every
    layer, and the layers of a region are adjacent. `num_kv_heads` and `head_dim` are then those of
    the first layer.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: Literal["float32", "bfloat16", "float16"]
    rope: Mapping[str, Any]
    not_movable: str | None = None
    layers: tuple[LayerFormat, ...] = ()

    @classmethod
    def of_layers(cls, layers: Sequence[LayerFormat], **fields: Any) -> Self:
        is_plain = layers[0].window is None and len(set(layers)) == 1
        return cls(
            num_layers=len(layers),
            num_kv_heads=layers[0].num_kv_heads,
            head_dim=layers[0].head_dim,
            layers=() if is_plain else tuple(layers),
            **fields,
        )

    def layer(self, index: int) -> LayerFormat:
        if self.layers:
            return self.layers[index]
        return LayerFormat(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)

    def storage_order(self) -> list[int]:
        """Layers in the order in which they are stored."""
        return sorted(range(self.num_layers), key=lambda index: self.layer(index).region)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuIpc:
    """Arguments with which a process on the same host opens GPU memory by CUDA IPC.

    These are arguments of `torch.multiprocessing.reductions.rebuild_cuda_tensor`, with bytes in
    base64. The memory is the bytes [offset, offset + num_bytes) of an allocation.
    """

    handle: str
    num_bytes: int
    offset: int
    ref_counter: str
    ref_counter_offset: int
    event: str
    event_sync_required: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """GPU memory of one rank for exported KV, with the KV heads [first_head, + num_heads).

    `gpu` is the UUID of the GPU.
    """

    gpu: str
    num_bytes: int
    first_head: int
    num_heads: int
    ipc: GpuIpc

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(**{**values, "ipc": GpuIpc(**values["ipc"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSlot:
    """Part of an arena file that receives the KV of a prompt's first `num_tokens` tokens.

    The KV of a slot with a `name` can be loaded later; names are unique.

    Every rank writes its own heads into the canonical layout, which starts at `offset` of the file,
    and then its ExportStatus, 8 bytes little-endian, at `status_offset + 8 * rank`.

    The pages of the status words are allocated, the words are zero, and the file's size does not
    change while the engine runs. `offset` is a multiple of 64. The engine does not write to a slot
    that exceeds the file; its status is FAILED.

    With a `gpu_offset` every rank also keeps its heads at this offset of its GpuMemory, contiguous.
    """

    arena: Path
    offset: int
    status_offset: int
    num_tokens: int
    name: str | None = None
    gpu_offset: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**_field_values(self), "arena": str(self.arena)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(**{**values, "arena": Path(values["arena"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedKv:
    """KV of a span as observed in another prompt, used to predict its KV in a new prompt.

    Both prompts have the same template. `real` is the export of the other prompt; the span starts
    at its token `token_offset` and is shifted by `shift` positions. `base` is the export of the
    same text prefilled alone, where the span starts at `base_token_offset`. Without a base, all
    tokens of the observation are weighted by `weight`.
    """

    real: ExportSlot
    token_offset: int
    shift: int
    base: ExportSlot | None = None
    base_token_offset: int = 0
    weight: float = 1.0

    @property
    def names(self) -> tuple[str | None, ...]:
        return (self.real.name,) if self.base is None else (self.real.name, self.base.name)

    def without_first(self, num_tokens: int) -> Self:
        """This observation without its first `num_tokens` tokens."""
        return replace(
            self,
            token_offset=self.token_offset + num_tokens,
            base_token_offset=self.base_token_offset + num_tokens,
        )

    def to_dict(self) -> dict[str, Any]:
        base = None if self.base is None else self.base.to_dict()
        return {**_field_values(self), "real": self.real.to_dict(), "base": base}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        base = None if values["base"] is None else ExportSlot.from_dict(values["base"])
        return cls(**{**values, "real": ExportSlot.from_dict(values["real"]), "base": base})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPiece:
    """A span of exported KV that is spliced into a prompt.

    The span is `num_tokens` tokens of `source`, starting at its token `token_offset`. It is written
    at position `start` of the prompt, with its keys shifted by `shift` positions.

    With `observations`, the KV of every layer but the first is predicted: the source plus the
    weighted differences between the observations and their bases, or the weighted observations
    themselves if they have no base. The weights are per token and depend on how close each base is
    to the source.
    """

    source: ExportSlot
    token_offset: int
    num_tokens: int
    start: int
    shift: int
    observations: tuple[ObservedKv, ...] = ()

    @property
    def end(self) -> int:
        """Position in the prompt after the span's last token."""
        return self.start + self.num_tokens

    @property
    def names(self) -> tuple[str | None, ...]:
        """Names of all exports from which the span's KV is made."""
        return (self.source.name, *(name for kv in self.observations for name in kv.names))

    def suffix_from(self, position: int) -> Self:
        """The part of the span that starts at prompt position `position`."""
        num_skipped = position - self.start
        return replace(
            self,
            token_offset=self.token_offset + num_skipped,
            num_tokens=self.num_tokens - num_skipped,
            start=position,
            observations=tuple(kv.without_first(num_skipped) for kv in self.observations),
        )

    def prefix_until(self, position: int) -> Self:
        """The part of the span that ends before prompt position `position`."""
        return replace(self, num_tokens=position - self.start)

    def to_dict(self) -> dict[str, Any]:
        observations = [kv.to_dict() for kv in self.observations]
        return {
            **_field_values(self),
            "source": self.source.to_dict(),
            "observations": observations,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        observations = tuple(ObservedKv.from_dict(kv) for kv in values["observations"])
        source = ExportSlot.from_dict(values["source"])
        return cls(**{**values, "source": source, "observations": observations})


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLoad:
    """Spans of a prompt whose KV is loaded from exports instead of being prefilled.

    A vLLM request prefills only the tail of its prompt, so a prompt with several spans is a `chain`
    of `num_requests` requests. Each ends where the next span begins, and finds the blocks of the
    previous requests in the prefix cache. They are scheduled together once all have arrived. Blocks
    from the one that holds token `exact_tokens`, or the first loaded token, onwards are private to
    the chain. Earlier blocks are shared with every request of the same tokens and salt.

    Consecutive spans are loaded together, starting at a block boundary, if everything before them
    is cached and they were exported under the weights version that serves when the request is
    scheduled. Otherwise they are prefilled.
    """

    chain: str
    num_requests: int
    exact_tokens: int
    pieces: tuple[LoadPiece, ...]

    def to_dict(self) -> dict[str, Any]:
        return {**_field_values(self), "pieces": [piece.to_dict() for piece in self.pieces]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        pieces = tuple(LoadPiece.from_dict(piece) for piece in values["pieces"])
        return cls(**{**values, "pieces": pieces})


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTransferParams:
    """KV transfers of one engine request: the slot to export to, and the KV to load."""

    export: ExportSlot | None = None
    load: KvLoad | None = None

    def to_dict(self) -> dict[str, Any]:
        given = {"export": self.export, "load": self.load}
        return {name: value.to_dict() for name, value in given.items() if value is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any] | None) -> Self:
        export, load = (values or {}).get("export"), (values or {}).get("load")
        return cls(
            export=None if export is None else ExportSlot.from_dict(export),
            load=None if load is None else KvLoad.from_dict(load),
        )


def _field_values(instance: Any) -> dict[str, Any]:
    """Field values of a dataclass by name, not converted recursively."""
    return {field.name: getattr(instance, field.name) for field in fields(instance)}

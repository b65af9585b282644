"""Keys and values outside the engine: where it writes a prompt's, and what it takes from there."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal


class ExportStatus(IntEnum):
    """What a rank has to say about its part of an export: written once, after the bytes."""

    PENDING = 0
    COMMITTED = 1
    MIXED_VERSION = 2
    FAILED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFormat:
    """The canonical layout of a prompt's keys and values: for each layer in order, K then V, each
    [kv_heads, tokens, head_dim], C-contiguous, nothing in between; keys after rotary embedding.
    `not_movable`: why keys cannot be moved to other positions, if they cannot.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: Literal["float32", "bfloat16", "float16"]
    rope: Mapping[str, Any]
    not_movable: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSlot:
    """Where the engine writes the keys and values of the prompt's first `num_tokens` tokens. What
    has a `name`, which no other has, may be loaded from there.

    Every rank writes its own heads at their place in the canonical layout, which starts at `offset`
    of the file, and then its ExportWord, 8 bytes little-endian, at `words_offset + 8 * rank`.

    The file is fully allocated, zero at the words, and keeps its size for as long as the engine
    lives. `offset` is a multiple of 64. A slot that leaves the file is not written to: FAILED.
    """

    arena: Path
    offset: int
    status_offset: int
    num_tokens: int
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedKv:
    """What another prompt of the same shape has where a piece stands: its tokens from
    `token_offset` on, to be moved by `shift` positions. `base` is that prompt's own text, computed
    alone, from the first token of the piece on; without one all tokens of it count by `weight`.
    """

    real: ExportSlot
    token_offset: int
    shift: int
    base: ExportSlot | None = None
    base_token_offset: int = 0
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPiece:
    """`num_tokens` of an export's tokens, those from its own `token_offset` on, which stand in the
    prompt
    from `start` on, with their keys moved by `shift` positions.

    With `observations` what is written is predicted, in every layer but the first: the source, plus
    by how much each that was observed was off its own base, or the observed alone where they have
    none. Token by token they count by how near their base is to the source.
    """

    source: ExportSlot
    token_offset: int
    num_tokens: int
    start: int
    shift: int
    observations: tuple[ObservedKv, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLoad:
    """Keys and values in a prompt's midst that are not computed but taken from exports.

    A request computes nothing but its prompt's tail, so a prompt with several pieces is a `chain`
    of `num_requests`: each ends where the next piece begins, and finds what those before it have
    left in the cache. They are scheduled together once all have come. From the block on that holds
    token `exact_tokens`, or the first that is loaded, their blocks are found by nobody else;
    before, by whoever has the same tokens and salt.

    Pieces that follow one another are taken together, from where a cache block begins: if all
    before is cached, and they were written under the weights that serve when the request is
    scheduled. Otherwise they are computed.
    """

    chain: str
    num_requests: int
    exact_tokens: int
    pieces: tuple[LoadPiece, ...]

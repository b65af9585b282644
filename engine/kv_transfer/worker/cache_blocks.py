"""Protocols for copies between KV cache blocks and the shared-memory arena; CPU version.

cuda_block_exporter and cuda_block_loader have the implementations for GPUs.

`BlockReader.copy` either raises, or calls `on_done` exactly once, with None or the failure, when
the bytes have been written or never will be. No block is read after that, so the scheduler may
reallocate the blocks.

`BlockWriter.write` reads the span before it returns, or later on the current stream if the span's
memory is registered with the driver of a GPU: then its slot may be reused after `flush`, or after
the step. Work that runs afterwards, or later on the current stream, finds the blocks filled.

Shape of a span: [L, 2, H, T, D] with L layers, H heads, T tokens, D head_dim.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, ParamSpec, Protocol, TypeVar

import torch
from vllm import _custom_ops

from engine.kv_transfer.cache_layout import CacheLayout
from engine.runtime.feature_guard import Failure
from kernels.kv_block_copy import (
    PackOrder,
    index_digits,
    infer_order,
    pack,
    unpack,
)
from kernels.rope_shift import RotaryParams, shift_keys

P = ParamSpec("P")
T = TypeVar("T")
OnDone = Callable[[Failure | None], None]
NUM_PROBED_HEADS: Final = 2  # enough to verify that heads are packed alike


class CopyTarget(Protocol):
    """Memory that receives a rank's heads of a prompt, [L, 2, H, T, D]."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def gpu_offset(self) -> int | None:
        """Offset in the rank's GPU memory where the KV stays, or None if it does not."""

    def open(self) -> torch.Tensor:
        """View of the memory, whose pages are allocated by this call, which may raise."""

    def registered_parts(self, memory: torch.Tensor) -> list[torch.Tensor] | None:
        """Parts of contiguous bytes into which a GPU can copy directly, each by one transfer.

        None if it cannot.
        """


class BlockReader(Protocol):
    def copy(self, block_ids: Sequence[int], target: CopyTarget, on_done: OnDone) -> None: ...

    def flush(self) -> None:
        """Wait until `on_done` of every earlier `copy` has been called."""


class PackedBlockReader:
    """Reads the packed KV cache of vLLM's CPU backend, on the calling thread."""

    def __init__(self, caches: Sequence[torch.Tensor], order: PackOrder) -> None:
        self._caches, self._order = caches, order

    def copy(self, block_ids: Sequence[int], target: CopyTarget, on_done: OnDone) -> None:
        unpack(self._caches, block_ids, self._order, target.open())
        on_done(None)

    def flush(self) -> None:
        """No-op: copies are synchronous."""


class BlockWriter(Protocol):
    def write(
        self, span: torch.Tensor, shift: int, block_ids: Sequence[int], *, is_registered: bool
    ) -> None:
        """Write a span to blocks, with its keys shifted by `shift` positions.

        `is_registered`: its memory is registered with the driver of the GPU.
        """

    def flush(self) -> None:
        """Wait until all spans have been read."""


class PackedBlockWriter:
    """Writes into the packed KV cache of vLLM's CPU backend, on the calling thread."""

    def __init__(
        self, caches: Sequence[torch.Tensor], order: PackOrder, rotary: RotaryParams | None
    ) -> None:
        self._caches, self._order, self._rotary = caches, order, rotary

    def write(
        self,
        span: torch.Tensor,
        shift: int,
        block_ids: Sequence[int],
        *,
        is_registered: bool = False,
    ) -> None:
        values = span
        if shift:
            assert self._rotary is not None, "keys that cannot be shifted are not spliced"
            values = torch.empty(span.shape, dtype=span.dtype)
            values[:, 0] = shift_keys(span[:, 0], shift, self._rotary)
            values[:, 1] = span[:, 1]
        pack(values, self._caches, block_ids, self._order)

    def flush(self) -> None:
        """No-op: spans are read at once."""


def packed_order(
    caches: Sequence[torch.Tensor], layout: CacheLayout, attention_layers: Mapping[str, Any]
) -> PackOrder:
    """Order in which the model's cache on CPU stores the elements of a block.

    Call it once vLLM has chosen the attention kernels.
    """
    isa = attention_layers[layout.layers[0]].isa
    return derive_order(caches[0].shape[2], layout.head_dim, layout.dtype, isa)


def derive_order(block: int, head_dim: int, dtype: torch.dtype, isa: str) -> PackOrder:
    """Measure, with vLLM's cache-write operation, the order in which a block's elements are stored.

    The order depends on `isa`, the instruction set of the attention kernel.

    Keys and values are distinguished by writing one of them at a time. Raises UnknownPacking if
    packing is not a permutation.
    """
    digits = index_digits(block * head_dim, dtype)
    zeros = torch.zeros(block, NUM_PROBED_HEADS, head_dim, dtype=dtype, device="cpu")
    written = []
    for digit in digits:
        vectors = digit.view(block, 1, head_dim).expand(-1, NUM_PROBED_HEADS, -1).contiguous()
        keys = write_block(vectors, zeros, isa)
        values = write_block(zeros, vectors, isa)
        written.append((keys[:, : keys.shape[1] // 2], values[:, values.shape[1] // 2 :]))
    return PackOrder(
        keys=infer_order([keys for keys, _ in written]),
        values=infer_order([values for _, values in written]),
    )


def write_block(keys: torch.Tensor, values: torch.Tensor, isa: str) -> torch.Tensor:
    """Pack a block of keys and values [N, H, D] as vLLM does; returns [H, 2 * N * D]."""
    block, heads, head_dim = keys.shape
    cache = torch.zeros(1, heads, 2 * block, head_dim, dtype=keys.dtype, device="cpu")
    halves: Any = cache.chunk(2, dim=2)
    _custom_ops.cpu_attn_reshape_and_cache(
        keys,
        values,
        *halves,
        torch.arange(block),
        isa,
        k_scale=1.0,
        v_scale=1.0,
        kv_cache_dtype="auto",
    )
    return cache.view(heads, -1)

"""Python binding of the compiled CPU kernel for shared-prefix decode attention.

KV that rows share is read once for all of these rows; suffixes are read row by row. Shapes: T
tokens of a step, R rows, Hq and Hkv query and KV heads, D head size, B block size.

The library is loaded after torch, so that it uses torch's OpenMP threads: both link to
`libgomp.so.1`, and the dynamic loader reuses the one that torch has loaded.
"""

import ctypes
import hashlib
import os
from enum import IntEnum, StrEnum
from functools import cache as cached
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from kernels.shared_prefix_attention.sharing_plan import SharingPlan

LIBRARY = Path(__file__).with_name("libshared_prefix_attention.so")
VERSION = 2
ISA_VARIABLE = "COPPICE_SHARED_PREFIX_ISA"
"""Environment variable for tests: upper bound of the kernel variant, avx2 or avx512_bf16."""
_PLAN_FIELDS = (
    "node_blocks",
    "node_block_offsets",
    "node_tokens",
    "node_rows",
    "node_row_offsets",
    "suffix_starts",
)


class Isa(IntEnum):
    """Instruction-set variants of the CPU attention kernel, in ascending order."""

    AVX2 = 1
    AVX512_BF16 = 2


class KernelCall(ctypes.Structure):
    """ctypes mirror of the C++ struct `Call` in csrc/call.h."""

    _fields_ = [
        ("query", ctypes.c_void_p),
        ("query_stride", ctypes.c_int64),
        ("cache", ctypes.c_void_p),
        ("block_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("lse", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("block_table_stride", ctypes.c_int64),
        ("seq_lens", ctypes.c_void_p),
        ("query_starts", ctypes.c_void_p),
        *[(name, ctypes.c_void_p) for name in _PLAN_FIELDS],
        ("num_nodes", ctypes.c_int32),
        ("num_rows", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_size", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("element", ctypes.c_int32),
        ("isa", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("scale", ctypes.c_float),
    ]


def is_built() -> bool:
    """Return True if the compiled kernel exists and has the expected version.

    Building it requires a compiler.
    """
    return library() is not None


@cached
def version() -> str:
    """Digest of the compiled kernel, so that measurements of another build are not reused."""
    return hashlib.sha256(LIBRARY.read_bytes()).hexdigest() if is_built() else ""


@cached
def best_isa() -> Isa | None:
    """Best kernel variant that this CPU supports, or None."""
    loaded = library()
    isa = loaded.coppice_shared_prefix_isa() if loaded else 0
    return limited(Isa(isa), os.environ.get(ISA_VARIABLE)) if isa else None


def limited(isa: Isa, name: str | None) -> Isa:
    """Limit a kernel variant to the variant with this name; no limit if the name is None."""
    if name is None:
        return isa
    known = {each.name.lower(): each for each in Isa}
    if name not in known:
        raise ValueError(f"{ISA_VARIABLE} must be one of {', '.join(known)}")
    return min(isa, known[name])


@cached
def library() -> ctypes.CDLL | None:
    if not LIBRARY.exists():
        return None
    loaded = ctypes.CDLL(str(LIBRARY))
    loaded.coppice_shared_prefix_decode.argtypes = [ctypes.POINTER(KernelCall)]
    loaded.coppice_shared_prefix_decode.restype = None
    # A library built from other sources may have another struct layout.
    return loaded if loaded.coppice_shared_prefix_version() == VERSION else None


@lru_cache(maxsize=4)
def plan_pointers(plan: SharingPlan) -> dict[str, int]:
    """Addresses of the arrays of a sharing plan, for the compiled kernel.

    Cached, because a plan is used in every layer of many steps. The cache also keeps it alive.
    """
    return {name: getattr(plan, name).ctypes.data for name in _PLAN_FIELDS}


__all__ = [
    "LIBRARY",
    "DecodeStep",
    "Isa",
    "UnsupportedReason",
    "best_isa",
    "is_built",
    "unsupported_reason",
    "version",
]
MAX_QUERY_TOKENS = 16
HEAD_SIZES = range(32, 257, 32)
BLOCK_SIZE_STEP = 32
_DTYPE_CODES = {torch.bfloat16: 0, torch.float32: 1}


class UnsupportedReason(StrEnum):
    """Reason for falling back to vLLM's own attention."""

    NOT_BUILT = "not_built"
    ISA = "isa"
    DTYPE = "dtype"
    KV_CACHE_DTYPE = "kv_cache_dtype"
    HEAD_SIZE = "head_size"
    BLOCK_SIZE = "block_size"
    NOT_CAUSAL = "not_causal"
    SOFT_CAP = "soft_cap"
    ALIBI = "alibi"
    QUERY_LENGTH = "query_length"


def unsupported_reason(
    *,
    dtype: torch.dtype,
    kv_cache_dtype: torch.dtype,
    layout: str,
    head_size: int,
    block_size: int,
    causal: bool = True,
    soft_cap: bool = False,
    alibi: bool = False,
) -> UnsupportedReason | None:
    """Reason why the CPU kernel does not support an attention layer, or None if it does.

    `layout` is the name of vLLM's CPU attention kernel; kernels other than `vec` pack the cache
    differently.
    """
    reasons = {
        UnsupportedReason.NOT_BUILT: not is_built(),
        UnsupportedReason.ISA: layout != "vec" or best_isa() is None,
        UnsupportedReason.DTYPE: dtype not in _DTYPE_CODES,
        UnsupportedReason.KV_CACHE_DTYPE: kv_cache_dtype != dtype,
        UnsupportedReason.HEAD_SIZE: head_size not in HEAD_SIZES,
        UnsupportedReason.BLOCK_SIZE: block_size % BLOCK_SIZE_STEP != 0,
        UnsupportedReason.NOT_CAUSAL: not causal,
        UnsupportedReason.SOFT_CAP: soft_cap,
        UnsupportedReason.ALIBI: alibi,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


class DecodeStep:
    """Arguments of the CPU attention kernel in one decode step, shared by all layers."""

    def __init__(
        self,
        plan: SharingPlan,
        *,
        block_table: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        num_threads: int | None = None,
        isa: Isa | None = None,
    ) -> None:
        """Set the kernel arguments that are the same for all layers.

        Takes block_table[R, width], seq_lens[R] and query_start_loc[R + 1], all int32. Every row
        has at most MAX_QUERY_TOKENS query tokens. All positions of its nodes precede its second
        query token, so that every query of the row attends to all of them.
        """
        loaded = library()
        assert loaded is not None, "the kernel was not built"
        self._decode = loaded.coppice_shared_prefix_decode
        self._keep_alive = (plan, block_table, seq_lens, query_start_loc)
        for tensor in self._keep_alive[1:]:
            assert tensor.dtype == torch.int32 and tensor.stride(-1) == 1
        assert len(query_start_loc) == len(seq_lens) + 1 == len(block_table) + 1
        self._layout: tuple[object, ...] = ()
        self._call = KernelCall(
            block_table=block_table.data_ptr(),
            block_table_stride=block_table.stride(0),
            seq_lens=seq_lens.data_ptr(),
            query_starts=query_start_loc.data_ptr(),
            **plan_pointers(plan),
            num_nodes=len(plan.node_tokens),
            num_rows=len(seq_lens),
            isa=isa or best_isa(),
            num_threads=num_threads or torch.get_num_threads(),
        )
        self._reference = ctypes.byref(self._call)

    def layer(
        self,
        *,
        query: Tensor,
        cache: Tensor,
        scale: float,
        out: Tensor,
        lse: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Run the attention of one layer: write out[T, Hq, D] and, if given, lse[T, Hq].

        Reads query[T, Hq, D] and cache[blocks, Hkv, B, 2 * D]. lse is the natural log-sum-exp.
        sinks[Hq] are logits that take part in the softmax without a value. Padding tokens after
        those of the rows are not written.
        """
        layout = (
            query.dtype,
            query.shape,
            query.stride(),
            out.stride(),
            cache.shape,
            cache.stride(),
        )
        if layout != self._layout:
            self._set_layout(query, cache, out)
            self._layout = layout
        assert query.dtype == out.dtype == cache.dtype and out.shape == query.shape
        assert lse is None or (lse.is_contiguous() and lse.dtype == torch.float32)
        call = self._call
        call.query, call.cache, call.out = query.data_ptr(), cache.data_ptr(), out.data_ptr()
        call.lse = lse.data_ptr() if lse is not None else None
        sinks = None if sinks is None else sinks.float().contiguous()
        assert sinks is None or sinks.shape == query.shape[1:2]
        call.sinks = None if sinks is None else sinks.data_ptr()
        call.scale = scale
        self._decode(self._reference)

    def _set_layout(self, query: Tensor, cache: Tensor, out: Tensor) -> None:
        """Check and set strides and shapes of tensors, as the kernel does no bounds checks."""
        for tensor in (query, out):
            assert tensor.stride()[1:] == (query.shape[2], 1), "heads must be contiguous"
        assert cache.stride()[2:] == (cache.shape[3], 1) and cache.shape[3] == 2 * query.shape[2]
        call = self._call
        call.query_stride, call.out_stride = query.stride(0), out.stride(0)
        call.block_stride, call.head_stride = cache.stride(0), cache.stride(1)
        call.num_heads, call.head_size = query.shape[1:]
        _, call.num_kv_heads, call.block_size, _ = cache.shape
        call.element = _DTYPE_CODES[query.dtype]

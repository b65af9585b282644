"""Decode attention on CPUs by the compiled kernel beside this file, over vLLM's packed `vec` cache.

It reads what rows share once for all of them, and the rest row by row. Shapes: T tokens of a step,
R rows, Hq and Hkv query and KV heads, D head size, B block size.

The library is loaded after torch, so that its OpenMP threads are torch's own: both ask for
`libgomp.so.1`, and the loader gives the second what the first has loaded.
"""

import ctypes
import hashlib
from enum import IntEnum, StrEnum
from functools import cache as once
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from kernels.shared_prefix.plan import SharingPlan

LIBRARY = Path(__file__).with_name("libshared_prefix.so")
VERSION = 1
MAX_QUERY_TOKENS = 16
HEAD_SIZES = range(32, 257, 32)
BLOCK_SIZE_STEP = 32
_ELEMENTS = {torch.bfloat16: 0, torch.float32: 1}


class Isa(IntEnum):
    """What the kernel is compiled for."""

    AVX2 = 1
    AVX512_BF16 = 2


class Reason(StrEnum):
    """Why stock attention serves instead."""

    NOT_BUILT = "not_built"
    ISA = "isa"
    DTYPE = "dtype"
    KV_CACHE_DTYPE = "kv_cache_dtype"
    HEAD_SIZE = "head_size"
    BLOCK_SIZE = "block_size"
    NOT_CAUSAL = "not_causal"
    SLIDING_WINDOW = "sliding_window"
    SOFT_CAP = "soft_cap"
    ALIBI = "alibi"
    SINKS = "sinks"
    QUERY_LENGTH = "query_length"


def supported(
    *,
    dtype: torch.dtype,
    kv_cache_dtype: torch.dtype,
    layout: str,
    head_size: int,
    block_size: int,
    causal: bool = True,
    sliding_window: bool = False,
    soft_cap: bool = False,
    alibi: bool = False,
    sinks: bool = False,
) -> Reason | None:
    """Why a layer cannot be served, or None. `layout` is the name of vLLM's own kernel: others
    than `vec` pack the cache in another way."""
    reasons = {
        Reason.NOT_BUILT: not built(),
        Reason.ISA: layout != "vec" or available() is None,
        Reason.DTYPE: dtype not in _ELEMENTS,
        Reason.KV_CACHE_DTYPE: kv_cache_dtype != dtype,
        Reason.HEAD_SIZE: head_size not in HEAD_SIZES,
        Reason.BLOCK_SIZE: block_size % BLOCK_SIZE_STEP != 0,
        Reason.NOT_CAUSAL: not causal,
        Reason.SLIDING_WINDOW: sliding_window,
        Reason.SOFT_CAP: soft_cap,
        Reason.ALIBI: alibi,
        Reason.SINKS: sinks,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def built() -> bool:
    """Whether there is a library of this version: a checkout without a compiler has none."""
    return _library() is not None


@once
def version() -> str:
    """A digest of the library: what has been measured with another one does not hold."""
    return hashlib.sha256(LIBRARY.read_bytes()).hexdigest() if built() else ""


@once
def available() -> Isa | None:
    """The best variant for this processor."""
    library = _library()
    isa = library.coppice_shared_prefix_isa() if library else 0
    return Isa(isa) if isa else None


def decode(
    plan: SharingPlan,
    *,
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    out: Tensor,
    lse: Tensor | None = None,
    num_threads: int | None = None,
    isa: Isa | None = None,
) -> None:
    """Writes out[T, Hq, D], and the natural logarithms of the sums into lse[T, Hq].

    query[T, Hq, D], cache[blocks, Hkv, B, 2 * D], block_table[R, width], seq_lens[R] and
    query_start_loc[R + 1], the last three int32. Every row has at most MAX_QUERY_TOKENS tokens, and
    all that its nodes hold comes before its second one.
    """
    library = _library()
    assert library is not None, "the kernel was not built"
    _check(query, cache, block_table, seq_lens, query_start_loc, out, lse)
    num_blocks, num_kv_heads, block_size, _ = cache.shape
    call = _Call(
        query=query.data_ptr(),
        query_stride=query.stride(0),
        cache=cache.data_ptr(),
        block_stride=cache.stride(0),
        head_stride=cache.stride(1),
        out=out.data_ptr(),
        out_stride=out.stride(0),
        lse=lse.data_ptr() if lse is not None else None,
        block_table=block_table.data_ptr(),
        block_table_stride=block_table.stride(0),
        seq_lens=seq_lens.data_ptr(),
        query_starts=query_start_loc.data_ptr(),
        **_pointers(plan),
        num_nodes=len(plan.node_tokens),
        num_rows=len(seq_lens),
        num_heads=query.shape[1],
        num_kv_heads=num_kv_heads,
        head_size=query.shape[2],
        block_size=block_size,
        element=_ELEMENTS[query.dtype],
        isa=isa or available(),
        num_threads=num_threads or torch.get_num_threads(),
        scale=scale,
    )
    library.coppice_shared_prefix_decode(ctypes.byref(call))


def _check(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """The kernel trusts its pointers."""
    for tensor in (query, out):
        assert tensor.shape == query.shape and tensor.dtype == cache.dtype
        assert tensor.stride()[1:] == (query.shape[2], 1), "heads lie side by side"
    assert cache.stride()[2:] == (cache.shape[3], 1) and cache.shape[3] == 2 * query.shape[2]
    for tensor in (block_table, seq_lens, query_start_loc):
        assert tensor.dtype == torch.int32 and tensor.stride(-1) == 1
    assert len(query_start_loc) == len(seq_lens) + 1 == len(block_table) + 1
    assert lse is None or (lse.is_contiguous() and lse.dtype == torch.float32)


_PLAN = (
    "node_blocks",
    "node_block_offsets",
    "node_tokens",
    "node_rows",
    "node_row_offsets",
    "suffix_starts",
)


@lru_cache(maxsize=4)
def _pointers(plan: SharingPlan) -> dict[str, int]:
    """Of one plan many times over: it serves every layer of many steps, and stays alive here."""
    return {name: getattr(plan, name).ctypes.data for name in _PLAN}


class _Call(ctypes.Structure):
    """csrc/call.h, field by field."""

    _fields_ = [
        ("query", ctypes.c_void_p),
        ("query_stride", ctypes.c_int64),
        ("cache", ctypes.c_void_p),
        ("block_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("lse", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("block_table_stride", ctypes.c_int64),
        ("seq_lens", ctypes.c_void_p),
        ("query_starts", ctypes.c_void_p),
        *[(name, ctypes.c_void_p) for name in _PLAN],
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


@once
def _library() -> ctypes.CDLL | None:
    if not LIBRARY.exists():
        return None
    library = ctypes.CDLL(str(LIBRARY))
    library.coppice_shared_prefix_decode.argtypes = [ctypes.POINTER(_Call)]
    library.coppice_shared_prefix_decode.restype = None
    # One that was built from other sources would read the call wrongly.
    return library if library.coppice_shared_prefix_version() == VERSION else None

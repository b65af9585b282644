"""The compiled library beside this file: whether it is there, what it can do, how it is called.

It is loaded after torch, so that its OpenMP threads are torch's own: both ask for `libgomp.so.1`,
and the loader gives the second what the first has loaded.
"""

import ctypes
import hashlib
import os
from enum import IntEnum
from functools import cache as cached
from functools import lru_cache
from pathlib import Path

from kernels.shared_prefix_attention.plan import SharingPlan

LIBRARY = Path(__file__).with_name("libshared_prefix_attention.so")
VERSION = 1
ISA_VARIABLE = "COPPICE_SHARED_PREFIX_ISA"
"""For tests: the best variant that may be used, avx2 or avx512_bf16."""
_PLAN_FIELDS = (
    "node_blocks",
    "node_block_offsets",
    "node_tokens",
    "node_rows",
    "node_row_offsets",
    "suffix_starts",
)


class Isa(IntEnum):
    """What the kernel is compiled for."""

    AVX2 = 1
    AVX512_BF16 = 2


class KernelCall(ctypes.Structure):
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
    """Whether there is a library of this version: a checkout without a compiler has none."""
    return library() is not None


@cached
def version() -> str:
    """A digest of the library: what has been measured with another one does not hold."""
    return hashlib.sha256(LIBRARY.read_bytes()).hexdigest() if is_built() else ""


@cached
def best_isa() -> Isa | None:
    """The best variant for this processor."""
    loaded = library()
    isa = loaded.coppice_shared_prefix_isa() if loaded else 0
    return limited(Isa(isa), os.environ.get(ISA_VARIABLE)) if isa else None


def limited(isa: Isa, name: str | None) -> Isa:
    """The lesser of a variant and the one of that name."""
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
    # One that was built from other sources would read the call wrongly.
    return loaded if loaded.coppice_shared_prefix_version() == VERSION else None


@lru_cache(maxsize=4)
def plan_pointers(plan: SharingPlan) -> dict[str, int]:
    """Of one plan many times over: it serves every layer of many steps, and stays alive here."""
    return {name: getattr(plan, name).ctypes.data for name in _PLAN_FIELDS}

"""ctypes binding of the compiled attention library, and its instruction-set variants.

It is loaded after torch, so that it uses torch's OpenMP threads: both link to `libgomp.so.1`, and
the dynamic loader reuses the one that torch has loaded.
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
"""Environment variable for tests: upper bound of the variant, avx2 or avx512_bf16."""
_PLAN_FIELDS = (
    "node_blocks",
    "node_block_offsets",
    "node_tokens",
    "node_rows",
    "node_row_offsets",
    "suffix_starts",
)


class Isa(IntEnum):
    """Instruction-set variants of the kernel, in ascending order."""

    AVX2 = 1
    AVX512_BF16 = 2


class KernelCall(ctypes.Structure):
    """Mirror of `Call` in csrc/call.h."""

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
    """Return True if the library was built for this version; that requires a compiler."""
    return library() is not None


@cached
def version() -> str:
    """Digest of the library. Measurements of another build are not reused."""
    return hashlib.sha256(LIBRARY.read_bytes()).hexdigest() if is_built() else ""


@cached
def best_isa() -> Isa | None:
    """Best variant that this CPU supports, or None."""
    loaded = library()
    isa = loaded.coppice_shared_prefix_isa() if loaded else 0
    return limited(Isa(isa), os.environ.get(ISA_VARIABLE)) if isa else None


def limited(isa: Isa, name: str | None) -> Isa:
    """Variant limited to the one with the given name, if any."""
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
    """Addresses of a plan's arrays.

    Cached, because a plan is used in every layer of many steps. The cache also keeps it alive.
    """
    return {name: getattr(plan, name).ctypes.data for name in _PLAN_FIELDS}

"""ctypes binding of the compiled draft-index library."""

import ctypes
from functools import cache as cached
from pathlib import Path

from kernels.draft_index import params
from kernels.draft_index.interface import Scope

LIBRARY = Path(__file__).with_name("libdraft_index.so")
VERSION = 1


class Rules(ctypes.Structure):
    """Mirror of `Rules` in csrc/rules.h."""

    _fields_ = [
        ("max_bytes", ctypes.c_int64),
        ("log_tokens", ctypes.c_int64),
        ("max_draft_tokens", ctypes.c_int32),
        ("scopes", ctypes.c_int32),
        ("orders", ctypes.c_int32 * len(params.ORDERS)),
        *[
            (name, ctypes.c_int32)
            for name in (
                *("looks", "places", "enough", "skip_below", "skip_places"),
                *("all_order", "all_places", "all_enough"),
                *("history_texts", "texts", "text_tokens", "age_shift"),
                *("prompt_bytes", "text_bytes", "token_bytes", "log_token_bytes"),
            )
        ],
    ]


class Step(ctypes.Structure):
    """Mirror of `Step` in csrc/store.h."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("slots", "counts", "tokens", "limits")],
        *[(name, ctypes.c_void_p) for name in ("lengths", "drafts", "scope", "match_length")],
        *[(name, ctypes.c_void_p) for name in ("num_agreeing", "total", "probability")],
        ("num_rows", ctypes.c_int32),
        ("failed_row", ctypes.c_int32),
    ]


class Sizes(ctypes.Structure):
    """Mirror of `Sizes` in csrc/contents.h. `ContentsPointers` mirrors `Contents` there."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("prompts", "prompt_tokens", "texts")],
        *[(name, ctypes.c_int64) for name in ("text_tokens", "logged", "log_tokens")],
    ]


class ContentsPointers(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p)
        for name in (
            *("prompt_lengths", "prompt_tokens", "prompt_keys", "text_counts", "text_lengths"),
            *("text_ages", "text_groups", "text_tokens", "log_lengths", "log_ages"),
            *("log_prompts", "log_tokens", "tried", "accepted", "coarse_tried", "coarse_accepted"),
        )
    ]


def rules_struct(max_bytes: int, max_draft_tokens: int, scopes: frozenset[Scope]) -> Rules:
    return Rules(
        max_bytes=max_bytes,
        log_tokens=params.log_tokens(max_bytes),
        max_draft_tokens=max_draft_tokens,
        scopes=sum(1 << scope for scope in scopes),
        orders=params.ORDERS,
        looks=params.MAX_LOOKUPS,
        places=params.MAX_VOTES,
        enough=params.MIN_VOTES,
        skip_below=params.MISMATCH_BELOW,
        skip_places=params.MAX_MISMATCH_VOTES,
        all_order=params.ALL_ORDER,
        all_places=params.ALL_MAX_VOTES,
        all_enough=params.ALL_MIN_VOTES,
        history_texts=params.MAX_FINISHED_TEXTS,
        texts=params.MAX_TEXTS,
        text_tokens=params.MAX_TEXT_TOKENS - 1,
        age_shift=params.AGE_SHIFT,
        prompt_bytes=params.PROMPT_BYTES,
        text_bytes=params.TEXT_BYTES,
        token_bytes=params.TOKEN_BYTES,
        log_token_bytes=params.LOG_TOKEN_BYTES,
    )


@cached
def library() -> ctypes.CDLL | None:
    if not LIBRARY.exists():
        return None
    loaded = ctypes.CDLL(str(LIBRARY))
    store = data = ctypes.c_void_p
    number = ctypes.c_int32
    loaded.coppice_drafts_create.argtypes = [data]
    loaded.coppice_drafts_create.restype = store
    loaded.coppice_drafts_destroy.argtypes = [store]
    key = ctypes.c_uint64
    loaded.coppice_drafts_begin.argtypes = [store, key, key, data, number]
    loaded.coppice_drafts_end.argtypes = [store, number, number]
    loaded.coppice_drafts_age.argtypes = [store]
    loaded.coppice_drafts_step.argtypes = [store, data]
    loaded.coppice_drafts_reliability.argtypes = [store, data, data, data]
    loaded.coppice_drafts_sizes.argtypes = [store, data]
    loaded.coppice_drafts_write.argtypes = [store, data]
    loaded.coppice_drafts_read.argtypes = [store, data, data]
    for name in ("charge", "num_tokens", "bytes"):
        function = getattr(loaded, f"coppice_drafts_{name}")
        function.argtypes, function.restype = [store], ctypes.c_int64
    # A library built from other sources may have other struct layouts.
    return loaded if loaded.coppice_drafts_version() == VERSION else None

"""Python binding of the compiled draft store: lookup of drafts in generated texts.

The protocol `Store` documents its methods. Not thread-safe. One call into the library does a whole
step.
"""

import ctypes
from functools import cache as cached
from pathlib import Path

import numpy as np

from kernels.draft_index import store_protocol
from kernels.draft_index.store_protocol import (
    ALL_SCOPES,
    NUM_BINS,
    NUM_SCOPES,
    TOO_MANY_TEXTS,
    DraftBatch,
    Int32Array,
    InvalidCall,
    Reliability,
    Scope,
    check_begin,
    check_step,
    hash_key,
)

LIBRARY = Path(__file__).with_name("libdraft_index.so")
VERSION = 2


class Params(ctypes.Structure):
    """ctypes mirror of the C++ struct `Params` in csrc/params.h."""

    _fields_ = [
        ("max_bytes", ctypes.c_int64),
        ("log_tokens", ctypes.c_int64),
        ("max_draft_tokens", ctypes.c_int32),
        ("scopes", ctypes.c_int32),
        ("orders", ctypes.c_int32 * len(store_protocol.ORDERS)),
        *[
            (name, ctypes.c_int32)
            for name in (
                *("max_lookups", "max_votes", "min_votes"),
                *("mismatch_below", "max_mismatch_votes"),
                *("all_order", "all_max_votes", "all_min_votes"),
                *("max_finished_texts", "max_texts", "max_text_tokens", "age_shift"),
                *("prompt_bytes", "text_bytes", "token_bytes", "log_token_bytes"),
            )
        ],
    ]


class Step(ctypes.Structure):
    """ctypes mirror of the C++ struct `Step` in csrc/draft_store.h."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("slots", "counts", "tokens", "limits")],
        *[(name, ctypes.c_void_p) for name in ("lengths", "drafts", "scope", "match_length")],
        *[(name, ctypes.c_void_p) for name in ("num_agreeing", "total", "probability")],
        ("num_rows", ctypes.c_int32),
        ("failed_row", ctypes.c_int32),
    ]


def params_struct(max_bytes: int, max_draft_tokens: int, scopes: frozenset[Scope]) -> Params:
    return Params(
        max_bytes=max_bytes,
        log_tokens=store_protocol.log_tokens(max_bytes),
        max_draft_tokens=max_draft_tokens,
        scopes=sum(1 << scope for scope in scopes),
        orders=store_protocol.ORDERS,
        max_lookups=store_protocol.MAX_LOOKUPS,
        max_votes=store_protocol.MAX_VOTES,
        min_votes=store_protocol.MIN_VOTES,
        mismatch_below=store_protocol.MISMATCH_BELOW,
        max_mismatch_votes=store_protocol.MAX_MISMATCH_VOTES,
        all_order=store_protocol.ALL_ORDER,
        all_max_votes=store_protocol.ALL_MAX_VOTES,
        all_min_votes=store_protocol.ALL_MIN_VOTES,
        max_finished_texts=store_protocol.MAX_FINISHED_TEXTS,
        max_texts=store_protocol.MAX_TEXTS,
        max_text_tokens=store_protocol.MAX_TEXT_TOKENS - 1,
        age_shift=store_protocol.AGE_SHIFT,
        prompt_bytes=store_protocol.PROMPT_BYTES,
        text_bytes=store_protocol.TEXT_BYTES,
        token_bytes=store_protocol.TOKEN_BYTES,
        log_token_bytes=store_protocol.LOG_TOKEN_BYTES,
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
    for name in ("charge", "num_tokens", "bytes"):
        function = getattr(loaded, f"coppice_drafts_{name}")
        function.argtypes, function.restype = [store], ctypes.c_int64
    # A library built from other sources may have other struct layouts.
    return loaded if loaded.coppice_drafts_version() == VERSION else None


def is_built() -> bool:
    """Return True if the compiled draft store exists and has the expected version.

    Building it requires a compiler.
    """
    return library() is not None


class DraftStore:
    """Draft store implemented by the compiled library; owns the memory allocated there."""

    def __init__(
        self, *, max_bytes: int, max_draft_tokens: int = 16, scopes: frozenset[Scope] = ALL_SCOPES
    ) -> None:
        assert 1 <= max_draft_tokens <= store_protocol.MAX_DRAFT_TOKENS
        loaded = library()
        assert loaded is not None, "the draft store was not built"
        self._library, self._max_draft_tokens = loaded, max_draft_tokens
        given = params_struct(max_bytes, max_draft_tokens, scopes)
        self._store = ctypes.c_void_p(loaded.coppice_drafts_create(ctypes.byref(given)))

    def __del__(self) -> None:
        if hasattr(self, "_store"):
            self._library.coppice_drafts_destroy(self._store)

    @property
    def num_bytes(self) -> int:
        return int(self._library.coppice_drafts_charge(self._store))

    @property
    def num_tokens(self) -> int:
        return int(self._library.coppice_drafts_num_tokens(self._store))

    @property
    def allocated_bytes(self) -> int:
        """Memory in bytes that the store has allocated, of which `num_bytes` is an upper bound."""
        return int(self._library.coppice_drafts_bytes(self._store))

    def begin(self, group: bytes, prompt: Int32Array) -> int:
        check_begin(prompt)
        prompt = np.ascontiguousarray(prompt)
        key = hash_key(prompt.tobytes())
        slot: int = self._library.coppice_drafts_begin(
            self._store, hash_key(group), key, prompt.ctypes.data, len(prompt)
        )
        if slot < 0:
            raise InvalidCall(TOO_MANY_TEXTS)
        return slot

    def end(self, slot: int, *, keep: bool) -> None:
        if self._library.coppice_drafts_end(self._store, slot, keep):
            raise InvalidCall(f"slot {slot} is not in use")

    def age(self) -> None:
        self._library.coppice_drafts_age(self._store)

    def step(
        self, slots: Int32Array, counts: Int32Array, tokens: Int32Array, limits: Int32Array
    ) -> DraftBatch:
        check_step(slots, counts, tokens, limits)
        arguments = [np.ascontiguousarray(array) for array in (slots, counts, tokens, limits)]
        drafted = DraftBatch.empty(len(slots), self._max_draft_tokens)
        step = Step(
            *(array.ctypes.data for array in arguments),
            lengths=drafted.lengths.ctypes.data,
            drafts=drafted.tokens.ctypes.data,
            scope=drafted.scope.ctypes.data,
            match_length=drafted.match_length.ctypes.data,
            num_agreeing=drafted.num_agreeing.ctypes.data,
            total=drafted.total.ctypes.data,
            probability=drafted.probability.ctypes.data,
            num_rows=len(slots),
        )
        if error_code := self._library.coppice_drafts_step(self._store, ctypes.byref(step)):
            raise InvalidCall(_ERROR_MESSAGES[error_code].format(slot=slots[step.failed_row]))
        return drafted

    def reliability(self) -> Reliability:
        shape = NUM_SCOPES, NUM_BINS
        found = Reliability(
            tried=np.zeros(shape, np.int64),
            accepted=np.zeros(shape, np.int64),
            predicted=np.zeros(shape, np.float64),
        )
        self._library.coppice_drafts_reliability(
            self._store,
            found.tried.ctypes.data,
            found.accepted.ctypes.data,
            found.predicted.ctypes.data,
        )
        return found


_ERROR_MESSAGES = {
    -1: "slot {slot} is not in use",
    -2: "slot {slot} occurs twice in the step",
    -3: f"slot {{slot}} has more than {store_protocol.MAX_TEXT_TOKENS} tokens",
}

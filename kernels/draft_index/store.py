"""Compiled draft store; `Store` documents its methods.

Not thread-safe. One call into the library does a whole step.
"""

import ctypes
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kernels.draft_index import params
from kernels.draft_index.acceptance_estimate import NUM_CELLS, NUM_COARSE_CELLS, NUM_SCOPES
from kernels.draft_index.arguments import check_begin, check_step, hash_key
from kernels.draft_index.errors import InvalidCall
from kernels.draft_index.file_format import StoreContents
from kernels.draft_index.interface import ALL_SCOPES, DraftBatch, Int32Array, Scope
from kernels.draft_index.library import ContentsPointers, Sizes, Step, library, rules_struct
from kernels.draft_index.reliability import NUM_BINS, Reliability


def is_built() -> bool:
    """Return True if the library was built for this version; that requires a compiler."""
    return library() is not None


class DraftStore:
    """Implementation of `Store` by the library, whose memory it owns."""

    def __init__(
        self, *, max_bytes: int, max_draft_tokens: int = 16, scopes: frozenset[Scope] = ALL_SCOPES
    ) -> None:
        assert 1 <= max_draft_tokens <= params.MAX_DRAFT_TOKENS
        loaded = library()
        assert loaded is not None, "the draft store was not built"
        self._library, self._max_draft_tokens = loaded, max_draft_tokens
        given = rules_struct(max_bytes, max_draft_tokens, scopes)
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
        """Memory that is actually allocated, of which `num_bytes` is an upper bound."""
        return int(self._library.coppice_drafts_bytes(self._store))

    def begin(self, group: bytes, prompt: Int32Array) -> int:
        check_begin(prompt)
        prompt = np.ascontiguousarray(prompt)
        key = hash_key(prompt.tobytes())
        slot: int = self._library.coppice_drafts_begin(
            self._store, hash_key(group), key, prompt.ctypes.data, len(prompt)
        )
        if slot < 0:
            raise InvalidCall(f"more than {params.MAX_TEXTS - 1} responses to one prompt at once")
        return slot

    def end(self, slot: int, *, keep: bool) -> None:
        if self._library.coppice_drafts_end(self._store, slot, keep):
            raise InvalidCall(f"no request has slot {slot}")

    def age(self) -> None:
        self._library.coppice_drafts_age(self._store)

    def step(
        self, slots: Int32Array, counts: Int32Array, tokens: Int32Array, limits: Int32Array
    ) -> DraftBatch:
        check_step(slots, counts, tokens, limits)
        asked = [np.ascontiguousarray(array) for array in (slots, counts, tokens, limits)]
        drafted = DraftBatch.empty(len(slots), self._max_draft_tokens)
        step = Step(
            *(array.ctypes.data for array in asked),
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

    def save(self, path: Path) -> None:
        sizes = Sizes()
        self._library.coppice_drafts_sizes(self._store, ctypes.byref(sizes))
        contents = _empty(sizes)
        no_keys = np.zeros(0, np.uint64)
        self._library.coppice_drafts_write(self._store, ctypes.byref(_pointers(contents, no_keys)))
        contents.write(path)

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        max_bytes: int,
        max_draft_tokens: int = 16,
        scopes: frozenset[Scope] = ALL_SCOPES,
        vocabulary: int | None = None,
    ) -> Self:
        """Load a saved store.

        With `vocabulary`, a file with larger token ids is refused, as they could be drafted.
        """
        contents = StoreContents.read(path, vocabulary)
        store = cls(max_bytes=max_bytes, max_draft_tokens=max_draft_tokens, scopes=scopes)
        keys = np.array(
            [hash_key(prompt.tobytes()) for prompt in contents.iter_prompts()], np.uint64
        )
        sizes = Sizes(
            prompts=len(contents.prompt_lengths),
            prompt_tokens=len(contents.prompt_tokens),
            texts=len(contents.text_lengths),
            text_tokens=len(contents.text_tokens),
            logged=len(contents.log_lengths),
            log_tokens=len(contents.log_tokens),
        )
        pointers = _pointers(contents, keys)
        store._library.coppice_drafts_read(
            store._store, ctypes.byref(sizes), ctypes.byref(pointers)
        )
        return store


_ERROR_MESSAGES = {
    -1: "no request has slot {slot}",
    -2: "slot {slot} is in the step twice",
    -3: f"slot {{slot}} has more than {params.MAX_TEXT_TOKENS} tokens",
}


def _empty(sizes: Sizes) -> StoreContents:
    return StoreContents(
        prompt_lengths=np.zeros(sizes.prompts, np.uint32),
        prompt_tokens=np.zeros(sizes.prompt_tokens, np.int32),
        text_counts=np.zeros(sizes.prompts, np.uint32),
        text_lengths=np.zeros(sizes.texts, np.uint32),
        text_ages=np.zeros(sizes.texts, np.uint32),
        text_groups=np.zeros(sizes.texts, np.uint64),
        text_tokens=np.zeros(sizes.text_tokens, np.int32),
        log_lengths=np.zeros(sizes.logged, np.uint32),
        log_ages=np.zeros(sizes.logged, np.uint32),
        log_prompts=np.zeros(sizes.logged, np.uint64),
        log_tokens=np.zeros(sizes.log_tokens, np.int32),
        tried=np.zeros(NUM_CELLS, np.uint32),
        accepted=np.zeros(NUM_CELLS, np.uint32),
        coarse_tried=np.zeros(NUM_COARSE_CELLS, np.uint32),
        coarse_accepted=np.zeros(NUM_COARSE_CELLS, np.uint32),
    )


def _pointers(contents: StoreContents, prompt_keys: NDArray[np.uint64]) -> ContentsPointers:
    arrays = contents.arrays() | {"prompt_keys": prompt_keys}
    return ContentsPointers(**{name: array.ctypes.data for name, array in arrays.items()})

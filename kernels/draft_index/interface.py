"""Interface of the draft store, implemented by `DraftStore` and by a reference in the tests."""

from dataclasses import dataclass, fields
from enum import IntEnum
from pathlib import Path
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from kernels.draft_index.reliability import Reliability

Int32Array = NDArray[np.int32]


class Scope(IntEnum):
    """Source of a drafted token."""

    SELF = 0
    """The request's own prompt or response."""
    SIBLINGS = 1
    """A response of the same group, running or finished."""
    PROMPT = 2
    """A response to the same prompt in another group, usually of an earlier epoch."""
    ALL = 3
    """A finished response to another prompt."""


ALL_SCOPES = frozenset(Scope)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBatch:
    """Drafts of a step, one row per slot. Rows are padded with zeros beyond `lengths`."""

    lengths: Int32Array
    """[rows]"""
    tokens: Int32Array
    """[rows, max_draft_tokens], like all arrays below"""
    scope: NDArray[np.uint8]
    match_length: NDArray[np.int16]
    """Length of the common suffix of the request's tokens and the matched context."""
    num_agreeing: NDArray[np.int16]
    """Number of matches, of `total`, that are continued by this token."""
    total: NDArray[np.int16]
    probability: NDArray[np.float32]
    """Predicted acceptance probability, given that all tokens before it are accepted."""

    def rows(self, numbers: NDArray[np.int64]) -> "DraftBatch":
        """Selection of rows."""
        return DraftBatch(**{each.name: getattr(self, each.name)[numbers] for each in fields(self)})

    @classmethod
    def empty(cls, rows: int, max_draft_tokens: int) -> Self:
        return cls(
            lengths=np.zeros(rows, np.int32),
            tokens=np.zeros((rows, max_draft_tokens), np.int32),
            scope=np.zeros((rows, max_draft_tokens), np.uint8),
            match_length=np.zeros((rows, max_draft_tokens), np.int16),
            num_agreeing=np.zeros((rows, max_draft_tokens), np.int16),
            total=np.zeros((rows, max_draft_tokens), np.int16),
            probability=np.zeros((rows, max_draft_tokens), np.float32),
        )


class Store(Protocol):
    """Index of generated texts that proposes draft tokens. Not thread-safe."""

    def begin(self, group: bytes, prompt: Int32Array) -> int:
        """Register a request and return its slot.

        Requests with the same `group` and prompt are siblings. Requests with the same prompt share
        its finished responses.
        """

    def end(self, slot: int, *, keep: bool) -> None:
        """End a request. With `keep` its response is stored as finished, otherwise deleted."""

    def age(self) -> None:
        """Age all stored texts by one weights version."""

    def step(
        self, slots: Int32Array, counts: Int32Array, tokens: Int32Array, limits: Int32Array
    ) -> DraftBatch:
        """Append tokens to all rows, then draft for each row.

        Row i gets the next `counts[i]` of the tokens, and a draft of at most `limits[i]` tokens.
        """

    def save(self, path: Path) -> None:
        """Save the finished responses; running requests are not saved."""

    def reliability(self) -> Reliability:
        """Predicted against actual acceptance of the drafts so far."""

    @property
    def num_bytes(self) -> int:
        """Upper bound of the memory used."""

    @property
    def num_tokens(self) -> int:
        """Number of stored tokens of prompts and responses, running and finished."""

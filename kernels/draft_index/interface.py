"""What a draft store is asked and what it answers, whichever of the two it is."""

from dataclasses import dataclass, fields
from enum import IntEnum
from pathlib import Path
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from kernels.draft_index.reliability import Reliability

Int32Array = NDArray[np.int32]


class Scope(IntEnum):
    """Whose text a drafted token was found in."""

    SELF = 0
    """The request's own response, or its prompt."""
    SIBLINGS = 1
    """A response of the same group, running or finished."""
    PROMPT = 2
    """A response to the same prompt in another group: of an earlier epoch, as a rule."""
    ALL = 3
    """A finished response to another prompt."""


ALL_SCOPES = frozenset(Scope)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBatch:
    """One row per slot of the step; beyond `lengths` a row holds zeros."""

    lengths: Int32Array
    """[rows]"""
    tokens: Int32Array
    """[rows, longest], as is all below"""
    scope: NDArray[np.uint8]
    match_length: NDArray[np.int16]
    """How many of the last tokens are also before the place the token was found at."""
    num_agreeing: NDArray[np.int16]
    """Of `total` places that were looked at, those that are followed by this token."""
    total: NDArray[np.int16]
    probability: NDArray[np.float32]
    """Of being accepted, given that all before it were."""

    def rows(self, numbers: NDArray[np.int64]) -> "DraftBatch":
        """Those rows alone."""
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
    """Texts that were generated, and drafts from them. For one thread."""

    def begin(self, group: bytes, prompt: Int32Array) -> int:
        """The slot of a request that starts. Those of one `group` and prompt are siblings; whoever
        has the same prompt shares its history."""

    def end(self, slot: int, *, keep: bool) -> None:
        """It has finished and becomes history, or is forgotten."""

    def age(self) -> None:
        """The weights have changed: everything stored is one version older."""

    def step(
        self, slots: Int32Array, counts: Int32Array, tokens: Int32Array, limits: Int32Array
    ) -> DraftBatch:
        """Row by row: appends the next `counts[i]` of the tokens, then, when every row has them,
        drafts at most `limits[i]`."""

    def save(self, path: Path) -> None:
        """What has finished; what is running is not in the file."""

    def reliability(self) -> Reliability:
        """What has come of the drafts so far."""

    @property
    def num_bytes(self) -> int:
        """An upper bound of what it holds."""

    @property
    def num_tokens(self) -> int:
        """Prompts and responses, running and finished."""

"""The batch of one decode step, and the drafts made for it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.speculation.request_table import TrackedRequest
from kernels.draft_index.interface import DraftBatch, Int32Array


@dataclass(slots=True, kw_only=True)
class Batch:
    """The rows of a step that received tokens, with their indices in the runner's batch.

    `lengths` are total sequence lengths; `tokens` are the tokens not yet in the draft store.
    """

    batch_indices: list[int]
    rows: list[TrackedRequest]
    lengths: list[int]
    tokens: list[Int32Array]

    def counts(self) -> Int32Array:
        return np.array([len(tokens) for tokens in self.tokens], dtype=np.int32)

    def draft_indices(self, ids: Sequence[str]) -> dict[str, int]:
        return {ids[place]: number for number, place in enumerate(self.batch_indices)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SentDrafts:
    """Drafts for the step in progress, by request, and the number of tokens of each sent."""

    draft_indices: dict[str, int]
    lengths: Int32Array
    drafted: DraftBatch | None
    """None while a profile is measured, where the draft tokens do not matter."""

    def to(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """The draft index of each request, -1 where it has none."""
        return np.array([self.draft_indices.get(request_id, -1) for request_id in ids], np.int64)

"""What one step is about: its rows and what they have said since, and what was drafted for them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.speculation.request_slots import TrackedRequest
from kernels.draft_index.interface import DraftBatch, Int32Array


@dataclass(slots=True, kw_only=True)
class Batch:
    """The rows that have tokens to go on from, by their place in the batch."""

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
    """What was drafted for the step under way, by request, and how much of it was sent."""

    draft_indices: dict[str, int]
    lengths: Int32Array
    drafted: DraftBatch | None
    """None while a profile is made, where it does not matter."""

    def to(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """The number of each request's draft, -1 without one."""
        return np.array([self.draft_indices.get(request_id, -1) for request_id in ids], np.int64)

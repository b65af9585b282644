"""What one step is about: its rows and what they have said since, and what was drafted for them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.speculation.request_slots import Row
from kernels.draft_index.interface import Drafted, Int32Array


@dataclass(slots=True, kw_only=True)
class Batch:
    """The rows that have tokens to go on from, by their place in the batch."""

    places: list[int]
    rows: list[Row]
    lengths: list[int]
    tokens: list[Int32Array]

    def counts(self) -> Int32Array:
        return np.array([len(tokens) for tokens in self.tokens], dtype=np.int32)

    def numbers(self, ids: Sequence[str]) -> dict[str, int]:
        return {ids[place]: number for number, place in enumerate(self.places)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What was drafted for the step under way, by request, and how much of it was sent."""

    numbers: dict[str, int]
    lengths: Int32Array
    drafted: Drafted | None
    """None while a profile is made, where it does not matter."""

    def to(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """The number of each request's draft, -1 without one."""
        return np.array([self.numbers.get(request_id, -1) for request_id in ids], np.int64)

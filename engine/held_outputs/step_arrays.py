"""Logprobs of the steps since the last flush, in arrays."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from vllm.v1.outputs import LogprobsLists

MIN_LENGTH: Final = 1024


class SlicePositions(LogprobsLists):  # type: ignore[misc]  # vLLM's types are not followed
    """A step's logprobs, which tell where a request's rows are without slicing them.

    vLLM's scheduler puts the result of `slice_request` into the outputs, unseen.
    """

    def slice_request(self, req_idx: int, num_positions: int) -> tuple[int, int]:
        """First position of a batch row, and the number of positions."""
        starts = self.cu_num_generated_tokens
        return req_idx if starts is None else starts[req_idx], num_positions


def sliced(step: LogprobsLists, first: int, number: int) -> LogprobsLists:
    """Logprobs of consecutive positions of a step, as vLLM itself slices them."""
    return LogprobsLists(*step[:3]).slice_request(first, number)


class StepArrays:
    """Arrays to which each step appends the logprobs of all its rows."""

    def __init__(self) -> None:
        self.length = 0
        self._token_ids = np.empty((0, 0), np.int32)
        self._logprobs = np.empty((0, 0), np.float32)
        self._ranks = np.empty(0, np.int32)

    @property
    def num_bytes(self) -> int:
        """Bytes in use."""
        return self.length * (8 * self._logprobs.shape[1] + 4)

    def clear(self) -> None:
        self.length = 0

    def append(self, step: LogprobsLists) -> int:
        """Append the rows of a step; returns the position of its first row."""
        first, (number, width) = self.length, step.logprobs.shape
        end = first + number
        self._reserve(end, width)
        self._token_ids[first:end, :width] = step.logprob_token_ids
        self._logprobs[first:end, :width] = step.logprobs
        self._ranks[first:end] = step.sampled_token_ranks
        self.length = end
        return first

    def _reserve(self, length: int, width: int) -> None:
        known, known_width = self._logprobs.shape
        if length <= known and width <= known_width:
            return
        shape = (max(length, 2 * known, MIN_LENGTH) if length > known else known, width)
        shape = (shape[0], max(width, known_width))
        self._token_ids = self._grown(self._token_ids, shape)
        self._logprobs = self._grown(self._logprobs, shape)
        self._ranks = self._grown(self._ranks, shape[:1])

    def _grown(self, old: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        new = np.empty(shape, old.dtype)
        within = (slice(self.length), *map(slice, old.shape[1:]))
        new[within] = old[: self.length]
        return new

    def take(self, positions: Sequence[int], width: int) -> LogprobsLists:
        """Copies of the logprobs at positions, `width` per position."""
        rows = np.array(positions, np.intp)
        return LogprobsLists(
            self._token_ids[rows, :width], self._logprobs[rows, :width], self._ranks[rows]
        )

"""Subclass of vLLM's LogprobsProcessor: logprobs in arrays, for speed.

vLLM keeps four Python objects per logprob and fills its lists one by one on the event loop. With
hundreds of logprobs per token this would stall all other requests.
"""

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from engine.types.samples import TopLogprobRows


class LogprobChunks:
    """Top logprobs of consecutive positions, in the order in which EngineCore sent them."""

    def __init__(self, chunks: list[TopLogprobRows] | None = None) -> None:
        self._chunks = chunks or []
        self._length = sum(map(len, self._chunks))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, at: slice) -> "LogprobChunks":
        """Chunks of a range of positions; it takes time in the distance from the end."""
        start, stop, _ = at.indices(self._length)
        found, end = list[TopLogprobRows](), self._length
        for chunk in reversed(self._chunks):
            begin = end - len(chunk)
            if begin < stop and start < end:
                found.append(chunk[max(start - begin, 0) : stop - begin])
            if begin <= start:
                break
            end = begin
        return LogprobChunks(found[::-1])

    def append(self, token_ids: NDArray[Any], logprobs: NDArray[Any], ranks: NDArray[Any]) -> None:
        self._length += len(ranks)
        # Copies, because vLLM's arrays are views of a message about the whole batch.
        self._chunks.append(
            TopLogprobRows(
                np.array(token_ids, np.int32),
                np.array(logprobs, np.float32),
                np.array(ranks, np.int64),
            )
        )

    def rows(self) -> TopLogprobRows:
        """The logprobs of all positions; joins the chunks."""
        if len(self._chunks) != 1:
            self._chunks = [_joined(self._chunks)]
        return self._chunks[0]


def _joined(chunks: list[TopLogprobRows]) -> TopLogprobRows:
    if not chunks:
        return TopLogprobRows(
            np.zeros((0, 1), np.int32), np.zeros((0, 1), np.float32), np.zeros(0, np.int64)
        )
    return TopLogprobRows.joined(chunks)


class ArrayLogprobsProcessor(LogprobsProcessor):  # type: ignore[misc]
    """vLLM's logprobs processor, with arrays for requests that return top logprobs.

    They have `flat_logprobs`, as `Generation` sends them. Requests for the sampled token's logprob
    only are processed as in vLLM.
    """

    cumulative_logprob: float

    @classmethod
    def from_new_request(cls, tokenizer: Any, request: Any) -> "ArrayLogprobsProcessor":
        self: ArrayLogprobsProcessor = super().from_new_request(tokenizer, request)
        if request.sampling_params.flat_logprobs:
            self.tokenizer = None  # which decodes each token once more
            if self.num_logprobs:
                self.logprobs = LogprobChunks()
            if self.num_prompt_logprobs is not None:
                self.prompt_logprobs = LogprobChunks()
        return self

    def _update_sample_logprobs(self, logprobs_lists: LogprobsLists) -> None:
        if not isinstance(self.logprobs, LogprobChunks):
            super()._update_sample_logprobs(logprobs_lists)
            return
        token_ids, logprobs, ranks, _ = logprobs_lists
        width = (self.num_logprobs or 0) + 1
        self.logprobs.append(token_ids[:, :width], logprobs[:, :width], ranks)
        self.cumulative_logprob += float(logprobs[:, 0].sum())

    def _update_prompt_logprobs(self, prompt_logprobs_tensors: LogprobsTensors) -> None:
        if not isinstance(self.prompt_logprobs, LogprobChunks):
            super()._update_prompt_logprobs(prompt_logprobs_tensors)
            return
        token_ids, logprobs, ranks, *_ = prompt_logprobs_tensors
        self.prompt_logprobs.append(token_ids.numpy(), logprobs.numpy(), ranks.numpy())


@functools.cache
def install() -> None:
    """Let vLLM's output processor make `ArrayLogprobsProcessor` instances."""
    from vllm.v1.engine import output_processor

    output_processor.LogprobsProcessor = ArrayLogprobsProcessor

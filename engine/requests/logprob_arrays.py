"""Subclass of vLLM's LogprobsProcessor: logprobs in arrays, for speed.

vLLM keeps four Python objects per logprob and fills its lists one by one on the event loop. That
would be most of the service's time per token, and with hundreds of logprobs per token it would
stall all other requests.
"""

import functools
from typing import Any

import numpy as np
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from engine.types.samples import TopLogprobRows


class LogprobChunks:
    """Top logprobs of consecutive positions, in the order in which EngineCore sent them."""

    def __init__(self) -> None:
        self._chunks: list[TopLogprobRows] = []

    @property
    def latest(self) -> TopLogprobRows:
        """The positions that were appended last."""
        return self._chunks[-1]

    def append(self, found: LogprobsLists, width: int) -> None:
        """Append copies of vLLM's arrays, which are views of a message about many requests."""
        token_ids, logprobs, ranks, _ = found
        self._chunks.append(
            TopLogprobRows(
                np.array(token_ids[:, :width], np.int32),
                np.array(logprobs[:, :width], np.float32),
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
    """vLLM's logprobs processor, with arrays for requests of `Generation`: with `flat_logprobs`."""

    cumulative_logprob: float

    @classmethod
    def from_new_request(cls, tokenizer: Any, request: Any) -> "ArrayLogprobsProcessor":
        self: ArrayLogprobsProcessor = super().from_new_request(tokenizer, request)
        if request.sampling_params.flat_logprobs:
            self.tokenizer = None  # which decodes each token once more
            if self.num_logprobs is not None:
                self.logprobs = LogprobChunks()
            if self.num_prompt_logprobs is not None:
                self.prompt_logprobs = LogprobChunks()
        return self

    def _update_sample_logprobs(self, logprobs_lists: LogprobsLists) -> None:
        if not isinstance(self.logprobs, LogprobChunks):
            super()._update_sample_logprobs(logprobs_lists)
            return
        self.logprobs.append(logprobs_lists, (self.num_logprobs or 0) + 1)
        self.cumulative_logprob += float(logprobs_lists.logprobs[:, 0].sum())

    def _update_prompt_logprobs(self, prompt_logprobs_tensors: LogprobsTensors) -> None:
        if not isinstance(self.prompt_logprobs, LogprobChunks):
            super()._update_prompt_logprobs(prompt_logprobs_tensors)
            return
        found = LogprobsLists(*(tensor.numpy() for tensor in prompt_logprobs_tensors[:3]))
        self.prompt_logprobs.append(found, found.logprobs.shape[1])


@functools.cache
def install() -> None:
    """Let vLLM's output processor make `ArrayLogprobsProcessor` instances."""
    from vllm.v1.engine import output_processor

    output_processor.LogprobsProcessor = ArrayLogprobsProcessor

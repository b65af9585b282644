"""Outputs of vLLM's engine client from the tokens of a sample, with vLLM's form of logprobs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.logprobs import PromptLogprobs, create_prompt_logprobs, create_sample_logprobs
from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from engine.protocol.openai_server import SampleDelta
from engine.types.samples import TopLogprobRows


class SampleOutputs:
    """Converts the deltas of one sample to vLLM's outputs."""

    def __init__(
        self, tokenizer: Any, params: SamplingParams, index: int, *, detokenizes: bool
    ) -> None:
        self._index = index
        self._detokenizes = detokenizes
        self._tokenizer = tokenizer
        self._skip_special_tokens = params.skip_special_tokens
        self._logprobs = None
        if params.logprobs is not None:
            self._logprobs = _processor(tokenizer, num_logprobs=params.logprobs)

    def output(self, delta: SampleDelta) -> CompletionOutput:
        end = delta.end
        return CompletionOutput(
            index=self._index,
            text=self._text(delta),
            token_ids=list(delta.token_ids),
            cumulative_logprob=None,
            logprobs=self._sample_logprobs(delta),
            finish_reason=end and end.finish_reason,
            stop_reason=end and end.stop_reason,
            weight_versions=end
            and [
                WeightVersionSpan(span["version"], span["start"], span["end"])
                for span in end.versions
            ],
        )

    def _text(self, delta: SampleDelta) -> str:
        if not self._detokenizes:
            return ""
        if delta.text is not None:
            return delta.text
        skip = self._skip_special_tokens
        return str(self._tokenizer.decode(delta.token_ids, skip_special_tokens=skip))

    def _sample_logprobs(self, delta: SampleDelta) -> Any:
        processor = self._logprobs
        if processor is None:
            return None
        if not delta.token_ids:
            return []
        processor._update_sample_logprobs(_lists(delta))
        return processor.logprobs[-len(delta.token_ids) :]


def num_values(params: SamplingParams, delta: SampleDelta) -> int:
    """Number of tokens and logprobs of a delta, which take about as long to convert."""
    return len(delta.token_ids) * (1 if params.logprobs is None else params.logprobs + 2)


def request_output(
    prompt: dict[str, Any],
    outputs: list[CompletionOutput],
    prompt_logprobs: PromptLogprobs | None,
    num_cached_tokens: int,
    block_size: int,
) -> RequestOutput:
    """Output of some samples of a prompt; `num_cached_tokens` are those of one of them.

    As in vLLM's statistics, the prefix cache now has the whole blocks of the prompt.
    """
    num_in_blocks = len(prompt["prompt_token_ids"]) // block_size * block_size
    return RequestOutput(
        request_id="",
        prompt=prompt.get("prompt"),
        prompt_token_ids=prompt["prompt_token_ids"],
        prompt_logprobs=prompt_logprobs,
        outputs=outputs,
        finished=False,
        num_cached_tokens=num_cached_tokens,
        num_cache_creation_tokens=max(0, num_in_blocks - num_cached_tokens),
    )


def prompt_logprobs(
    tokenizer: Any, params: SamplingParams, rows: TopLogprobRows | None
) -> PromptLogprobs | None:
    """Logprobs of a prompt; its first token has none."""
    if rows is None:
        return None
    processor = _processor(tokenizer, num_prompt_logprobs=params.prompt_logprobs)
    token_ids, logprobs, ranks = map(
        torch.from_numpy, (rows.token_ids[1:], rows.logprobs[1:], rows.ranks[1:])
    )
    processor._update_prompt_logprobs(LogprobsTensors(token_ids, logprobs, ranks))
    return processor.prompt_logprobs


def _processor(
    tokenizer: Any, *, num_logprobs: int | None = None, num_prompt_logprobs: int | None = None
) -> LogprobsProcessor:
    return LogprobsProcessor(
        tokenizer=tokenizer,
        logprobs=create_sample_logprobs(flat_logprobs=False),
        prompt_logprobs=create_prompt_logprobs(flat_logprobs=False),
        cumulative_logprob=0.0,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
    )


def _lists(delta: SampleDelta) -> LogprobsLists:
    rows = delta.top_logprobs
    if rows is not None:
        return LogprobsLists(rows.token_ids, rows.logprobs, rows.ranks)
    token_ids: Sequence[int] = delta.token_ids
    return LogprobsLists(
        np.array(token_ids, np.int32)[:, None],
        np.array(delta.logprobs, np.float32)[:, None],
        np.ones(len(token_ids), np.int64),
    )

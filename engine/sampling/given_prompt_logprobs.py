"""Hook in Model Runner V1: logprobs of given token ids at each prompt position.

vLLM's `SamplingParams.prompt_logprob_token_ids` needs the second model runner, which has no CPU
version. The first runner computes the logprobs of the top k at each prompt position. This hook lets
it gather the logprobs of the request's tokens instead.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

PROMPT_TOKEN_IDS_ARG = "coppice_prompt_token_ids"
"""Key in `extra_args`: token ids as int32 bytes, one row per prompt token after the first."""


def to_extra_args(given: NDArray[np.int32]) -> dict[str, Any]:
    return {PROMPT_TOKEN_IDS_ARG: np.ascontiguousarray(given, np.int32).tobytes()}


def given_rows(sampling_params: Any) -> NDArray[np.int32] | None:
    """Token ids [prompt tokens - 1, m] of a request; None if it has none."""
    data = (sampling_params.extra_args or {}).get(PROMPT_TOKEN_IDS_ARG)
    if data is None:
        return None
    return np.frombuffer(data, np.int32).reshape(-1, sampling_params.prompt_logprobs)


@contextmanager
def gathering(sampler: Any, rows: NDArray[np.int32] | None, start: int) -> Iterator[None]:
    """Let the sampler return the logprobs of given tokens, from row `start`, not of the top k."""
    if rows is None:
        yield
        return

    def gather(logprobs: torch.Tensor, num_logprobs: int, sampled: torch.Tensor) -> Any:
        found = type(sampler).gather_logprobs(logprobs, 0, sampled)
        given = torch.from_numpy(rows[start : start + len(logprobs)].astype(np.int64))
        given = given.to(logprobs.device)
        return found._replace(
            logprob_token_ids=torch.cat([found.logprob_token_ids, given.int()], 1),
            logprobs=torch.cat([found.logprobs, logprobs.gather(-1, given)], 1),
        )

    sampler.gather_logprobs = gather
    try:
        yield
    finally:
        del sampler.gather_logprobs


def with_given_tokens(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """vLLM's method for the prompt logprobs of a step, called per request if one has tokens."""

    @functools.wraps(method)
    def call(self: Any, hidden_states: Any, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        pending = self.num_prompt_logprobs
        rows = {req_id: given_rows(self.requests[req_id].sampling_params) for req_id in pending}
        if not any(of_request is not None for of_request in rows.values()):
            return method(self, hidden_states, num_scheduled_tokens)
        found: dict[str, Any] = {}
        try:
            for req_id, of_request in rows.items():
                self.num_prompt_logprobs = {req_id: pending[req_id]}
                start = self.requests[req_id].num_computed_tokens
                with gathering(self.sampler, of_request, start):
                    found |= method(self, hidden_states, num_scheduled_tokens)
                if not self.num_prompt_logprobs:  # vLLM removes it with its last chunk
                    del pending[req_id]
        finally:
            self.num_prompt_logprobs = pending
        return found

    return call


@functools.cache
def install() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    method = GPUModelRunner._get_prompt_logprobs_dict
    GPUModelRunner._get_prompt_logprobs_dict = with_given_tokens(method)

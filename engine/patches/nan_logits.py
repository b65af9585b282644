"""Patch for NaN logits: the sample ends with an error, other samples are unharmed.

https://github.com/vllm-project/vllm/pull/50002
https://github.com/Dao-AILab/flash-attention/issues/2374

Published weights are finite, but those of the start may not be, and activations may overflow.
Then, in vLLM 0.32.0:

- Model Runner V2 may sample a token id beyond the vocabulary (vllm/v1/worker/gpu/sample/gumbel.py):
  the maximum of a block that has NaN may be in a lane beyond the vocabulary. The embedding of the
  next step then ends the engine. Here the ids are clamped before they are used.
- The sample goes on to its end. Here it ends with the finish reason `error`.
- Attention multiplies the rest of a block by zero, so a request that receives a block with NaN of
  an earlier one has NaN logits, too. Here new blocks are zeroed from the first NaN on, as vLLM does
  for models that need it. Until then that would cost time in every step.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

Method = Callable[..., Any]


def requests_with_nan(output: Any) -> set[str]:
    """Requests that sampled a token with the logprob NaN, by a step's ModelRunnerOutput."""
    logprobs = output.logprobs
    if logprobs is None:
        return set()
    is_nan = np.isnan(logprobs.logprobs[:, 0])
    if not is_nan.any():
        return set()
    starts = logprobs.cu_num_generated_tokens or range(len(is_nan))
    return {
        request_id
        for request_id, row in output.req_id_to_index.items()
        if is_nan[starts[row] : starts[row] + len(output.sampled_token_ids[row])].any()
    }


def ending_nan_samples(update_from_output: Method) -> Method:
    """`Scheduler.update_from_output`, which also ends the samples that have NaN, with an error.

    vLLM ends requests with grammars that do not compile at the end of this method.
    """

    @functools.wraps(update_from_output)
    def update(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        if failed := requests_with_nan(model_runner_output):
            self.grammar_compile_error_reqs |= failed
            self.coppice_had_nan = True
        return update_from_output(self, scheduler_output, model_runner_output)

    return update


def zeroing_after_nan(get_block_ids: Method, needs_zeroing: Callable[[Any], bool]) -> Method:
    """`Scheduler._get_new_block_ids_to_zero`: None until a NaN, unless the model needs zeroing."""

    @functools.wraps(get_block_ids)
    def block_ids_to_zero(self: Any) -> list[int] | None:
        block_ids: list[int] | None = get_block_ids(self)
        had_nan = getattr(self, "coppice_had_nan", False)
        return block_ids if had_nan or needs_zeroing(self.kv_cache_config) else None

    return block_ids_to_zero


def clamping(sample: Method, index: int) -> Method:
    """Method that samples from its argument `logits`, with the token ids at `index` of its result.

    The ids are clamped into the vocabulary.
    """

    @functools.wraps(sample)
    def clamped(self: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
        result = sample(self, logits, *args, **kwargs)
        result[index].clamp_(0, logits.shape[-1] - 1)
        return result

    return clamped


@functools.cache
def install() -> None:
    """Patch the scheduler, and have the workers prepare the zeroing of blocks."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig

    needs_zeroing = KVCacheConfig.needs_kv_cache_zeroing.fget
    KVCacheConfig.needs_kv_cache_zeroing = property(lambda _: True)
    Scheduler._get_new_block_ids_to_zero = zeroing_after_nan(
        Scheduler._get_new_block_ids_to_zero, needs_zeroing
    )
    Scheduler.update_from_output = ending_nan_samples(Scheduler.update_from_output)


@functools.cache
def install_on_gpu() -> None:
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    install()
    Sampler.sample = clamping(Sampler.sample, 0)
    RejectionSampler._verify = clamping(RejectionSampler._verify, 1)

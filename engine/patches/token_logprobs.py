"""Patch for the time that a step on a GPU spends on the logprobs of its sampled tokens.

https://github.com/vllm-project/vllm/issues/55577
https://github.com/vllm-project/vllm/pull/55918

vllm/v1/worker/gpu/sample/logprob.py in 0.32.0 reads the logits twice, in tiles of 1,024 tokens
between which the threads of a row wait for each other: 298 loads one after the other at a
vocabulary of 152,000, whatever the number of rows. It is also compiled anew while requests are
served if a number of logprobs has not occurred before. The kernel here reads the logits once.
"""

import functools

from engine.runtime.feature_guard import feature

FEATURE = feature("logprobs in one pass")


@functools.cache
def install() -> None:
    from vllm.v1.worker.gpu.sample import logprob, prompt_logprob

    from kernels.token_logprobs import compute_token_logprobs

    compute = FEATURE.guarded(logprob.compute_token_logprobs)(compute_token_logprobs)
    logprob.compute_token_logprobs = prompt_logprob.compute_token_logprobs = compute

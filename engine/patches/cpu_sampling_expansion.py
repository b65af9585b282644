"""Patch of sampling parameters in speculative decoding on CPU: uninitialised values.

https://github.com/vllm-project/vllm/issues/55005

On CPU, sampled (not greedy) speculative verification reads uninitialised temperature, top-p and
top-k. `_expand_kernel_impl` passes the C++ kernel an int64 copy of its output, which is then
dropped (and would truncate a temperature of 0.7 to 0). This version writes to the given output.

The worker registers the kernel by value when it starts, so install this before that.
"""

import torch


def expand(
    output: torch.Tensor,
    values: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Write `values[i]` for each token of request i, replacing `replace_from` by `replace_to`.

    Names and order of the arguments are those of the Triton kernel.
    """
    num_tokens = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = values.masked_fill(values == replace_from, replace_to)
    output.copy_(replaced.repeat_interleave(num_tokens.to(torch.int64), output_size=len(output)))


def install() -> None:
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = expand

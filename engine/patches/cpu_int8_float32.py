"""Kernel of int8 checkpoints that are served in float32 on a processor with AMX.

vllm/model_executor/kernels/linear/scaled_mm/cpu.py:51 in 0.32.0; what the kernel for AMX accepts:
https://github.com/vllm-project/vllm/blob/v0.32.0/csrc/cpu/sgl-kernels/gemm_int8.cpp

vLLM selects that kernel by the shape and dtype of the weights. It raises an error for activations
in float32, which ends the engine. The kernel of processors without AMX, oneDNN's, accepts them.
"""

import functools

import torch


@functools.cache
def install() -> None:
    from vllm.model_executor.kernels.linear.scaled_mm import cpu

    upstream = cpu.check_cpu_sgl_kernel

    @functools.wraps(upstream)
    def check_cpu_sgl_kernel(n: int, k: int, dtype: torch.dtype) -> bool:
        """`dtype` is that of the weights; the default dtype is the model's while it is loaded."""
        is_float32 = torch.get_default_dtype() == torch.float32
        return not is_float32 and upstream(n, k, dtype)

    cpu.check_cpu_sgl_kernel = check_cpu_sgl_kernel

"""Patch of vLLM's int8 kernel choice on CPU: oneDNN for float32, refusal of x86 without VNNI.

vllm/model_executor/kernels/linear/scaled_mm/cpu.py:33 in 0.32.0. Its kernel for AMX:
https://github.com/vllm-project/vllm/blob/v0.32.0/csrc/cpu/sgl-kernels/gemm_int8.cpp
Its kernel for others: https://oneapi-src.github.io/oneDNN/dev_guide_int8_computations.html

vLLM selects the kernel for AMX by the shape and dtype of the weights. It raises an error for
activations in float32, which ends the engine. The other one, oneDNN's, accepts them. On x86 without
VNNI, however, oneDNN adds two products in 16 bits, and they saturate: the values are wrong, without
an error. There vLLM has no kernel now, and does not start.
"""

import functools

import torch

VNNI = ("avx512_vnni", "avx_vnni")
SATURATES = "without VNNI instructions, int8 products saturate; serve an unquantized checkpoint."


@functools.cache
def install() -> None:
    from vllm.model_executor.kernels.linear.scaled_mm import cpu

    upstream = cpu.check_cpu_sgl_kernel

    @functools.wraps(upstream)
    def check_cpu_sgl_kernel(n: int, k: int, dtype: torch.dtype) -> bool:
        """`dtype` is that of the weights; the default dtype is the model's while it is loaded."""
        is_float32 = torch.get_default_dtype() == torch.float32
        return not is_float32 and upstream(n, k, dtype)

    def is_supported(compute_capability: int | None = None) -> tuple[bool, str | None]:
        capabilities = torch.cpu.get_capabilities()
        reported = [capabilities[name] for name in VNNI if name in capabilities]  # none on ARM
        return (False, SATURATES) if reported and not any(reported) else (True, None)

    cpu.check_cpu_sgl_kernel = check_cpu_sgl_kernel
    cpu.CPUInt8ScaledMMLinearKernel.is_supported = staticmethod(is_supported)

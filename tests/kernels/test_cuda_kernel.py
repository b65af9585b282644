"""The Triton kernels without a GPU: run in Triton's interpreter, and compiled for a GPU."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is for x86-64 Linux")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import rope_shift_cuda as rotary_cuda
from kernels.shared_prefix_attention import cuda

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
POINTERS = {"outputs": "*fp32", "lses": "*fp32"} | dict.fromkeys(
    ("query", "keys", "values", "out"), "*bf16"
)
STRIDES = ("query_stride", "block_stride", "token_stride", "head_stride", "table_stride")


def test_triton_kernels_are_correct_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*command, "tests/kernels/interpreted_attention.py", "tests/kernels/interpreted_shift.py"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def compiled(kernel: Any, constants: dict[str, int], num_warps: int) -> Any:
    """Compiles for bfloat16 on an H100 or H200, with Triton's own copy of NVIDIA's assembler."""
    values = dict.fromkeys([*STRIDES, "out_stride"], "i32") | {"scale": "fp32"}
    types = {name: POINTERS.get(name, values.get(name, "*i32")) for name in kernel.arg_names}
    source = ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constexprs=constants)
    target = GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options={"num_warps": num_warps})


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_triton_kernels_compile_for_a_gpu() -> None:
    sizes = {"num_heads": 32, "head_size": 80, "padded_size": 128, "max_query_tokens": 1}
    blocks = {"block_size": 16, "ratio": 4, "num_queries": 64, "num_tokens": 64}
    attend = compiled(cuda._attention_kernel, sizes | blocks, num_warps=4)
    merge = compiled(cuda._merge_kernel, sizes, num_warps=1)
    assert attend.asm["cubin"] and merge.asm["cubin"]
    # The shared memory of a thread block on every GPU since the A10.
    assert attend.metadata.shared <= 99 * 1024


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_rope_shift_compiles_for_a_gpu() -> None:
    kernel = rotary_cuda._rotate_kernel
    types = {"keys": "*bf16", "cosines": "*fp32", "sines": "*fp32"}
    types |= dict.fromkeys(("num_rows", "head_dim", "half"), "i32")
    sizes = {"ROWS_PER_PROGRAM": rotary_cuda.ROWS_PER_PROGRAM, "NUM_PAIRS": 64}
    source = ASTSource(kernel, types | dict.fromkeys(sizes, "constexpr"), constexprs=sizes)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]

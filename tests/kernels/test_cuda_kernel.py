"""The Triton kernels without a GPU: run in Triton's interpreter, and compiled for a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is for x86-64 Linux")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import kv_gather_cuda, kv_scatter_cuda, token_logprobs
from kernels.shared_prefix_attention import cuda

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
INTERPRETED = ["attention", "gather", "logprobs", "scatter"]
CAPABILITIES = [80, 90, 100]
"""Compute capabilities of the A100, the H100 and H200, and the B200."""


@pytest.mark.exhaustive
def test_triton_kernels_are_correct_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*command, *(f"tests/kernels/interpreted_{name}.py" for name in INTERPRETED)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_merge_kernel_compiles_for_gpus(head_size: int, capability: int) -> None:
    """Compiled for bfloat16, with Triton's own copy of NVIDIA's assembler."""
    types = dict.fromkeys(cuda._merge_kernel.arg_names, "i32")
    types |= {"part_outs": "*bf16", "outs": "*bf16", "part_lses": "*fp32", "lses": "*fp32"}
    types |= {"offsets": "*i32", "parts": "*i32"}
    sizes = {"head_size": head_size, "padded_size": triton.next_power_of_2(head_size)}
    types |= dict.fromkeys(sizes, "constexpr")
    source = ASTSource(cuda._merge_kernel, types, constexprs=sizes)
    target = GPUTarget("cuda", capability, 32)
    assert triton.compile(source, target=target, options={"num_warps": 1}).asm["cubin"]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_gather_of_blocks_compiles_for_gpus(capability: int) -> None:
    kernel = kv_gather_cuda._gather_kernel
    sizes = {"vector_words": 32, "padded_words": 32, "tokens_per_program": 32}
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= dict.fromkeys(("addresses", "block_ids", "out"), "*i64")
    source = ASTSource(kernel, types | dict.fromkeys(sizes, "constexpr"), constexprs=sizes)
    assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("half", [32, 64])
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_scatter_of_blocks_compiles_for_gpus(half: int, capability: int) -> None:
    """With all of a key's channels rotated, and half of them."""
    kernel = kv_scatter_cuda._scatter_kernel
    sizes = {"head_dim": 128, "half": half, "padded_half": half, "padded_rest": 128 - 2 * half}
    sizes |= {"is_rotated": True, "alignment": 16, "tokens_per_tile": 32, "element": tl.bfloat16}
    types = dict.fromkeys(kernel.arg_names, "i32") | {"source": "i64", "cos_sin": "*fp32"}
    types |= dict.fromkeys(("addresses", "block_ids"), "*i64")
    source = ASTSource(kernel, types | dict.fromkeys(sizes, "constexpr"), constexprs=sizes)
    assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_token_logprobs_compile_for_gpus_without_barriers_between_tiles(
    dtype: str, capability: int
) -> None:
    """The loads of a tile, and the loop over the tiles, come before the first barrier."""
    kernel = token_logprobs._token_logprobs_kernel
    sizes = {"tile_rows": token_logprobs.TILE_ROWS, "tile_columns": token_logprobs.TILE_COLUMNS}
    types = dict.fromkeys(kernel.arg_names, "i32") | {"logits": f"*{dtype}", "logprobs": "*fp32"}
    types |= {"token_ids": "*i64"} | dict.fromkeys(sizes, "constexpr")
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(5)}
    built = triton.compile(
        ASTSource(kernel, types, constexprs=sizes, attrs=aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": token_logprobs.NUM_WARPS},
    )
    assert built.asm["cubin"]
    loop, *_ = built.asm["ptx"].split("bar.sync")
    loads = token_logprobs.TILE_ROWS * (2 if dtype == "fp32" else 1)
    assert loop.count("ld.global.v4") == loads and loop.count("bra") == 2

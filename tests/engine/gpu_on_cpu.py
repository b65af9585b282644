"""vLLM's CUDA platform in a process without a GPU: its own code for GPUs runs on CPU tensors.

`install` must run before anything of vLLM is imported, and lasts as long as the process. vLLM's
worker and Model Runner V2 are unchanged but for the choice of the device. Replaced is what lies
below them: streams and pinned memory by vLLM's own replacements for CPUs (vllm/v1/worker/cpu), the
compiled kernels by PyTorch, and Triton's launches by its interpreter. A CUDA graph is a list of
the calls that were made during its capture. A replay makes them again, on the same tensors, as a
GPU does: a captured pass reads the metadata of its capture.
"""

import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TRITON_INTERPRET": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    # Piecewise graphs without a compiler: attention ends one graph and begins the next.
    "VLLM_USE_BREAKABLE_CUDAGRAPH": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
WORKER = "tests.engine.gpu_on_cpu_worker.CpuTensorWorker"
MEMORY_BYTES = 2**31


class Graph:
    """CUDA graph whose replay repeats the calls of its capture."""

    capturing: "Graph | None" = None

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def record(self, call: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        self.calls.append(lambda: _store(call(*args, **kwargs), result))

    def replay(self) -> None:
        for call in self.calls:
            call()

    def capture_begin(self, **_: Any) -> None:
        Graph.capturing = self

    def capture_end(self) -> None:
        Graph.capturing = None


def _store(new: Any, captured: Any) -> None:
    """Write a call's new results to the tensors that it returned during the capture."""
    import torch
    from torch.utils._pytree import tree_leaves

    for source, target in zip(tree_leaves(new), tree_leaves(captured), strict=True):
        if isinstance(target, torch.Tensor) and source.data_ptr() != target.data_ptr():
            target.copy_(source)


@contextmanager
def capture(graph: Graph, *_: Any, **__: Any) -> Iterator[None]:
    """Replacement for `torch.cuda.graph`."""
    graph.capture_begin()
    try:
        yield
    finally:
        graph.capture_end()


def _record_operations() -> None:
    """Record PyTorch's operations in the graph that is being captured, for good in this thread."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    on_cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if Graph.capturing is not None and func.namespace == "vllm":
                with self:  # Python code, whose calls are recorded instead
                    return func.redispatch(on_cpu, *args, **kwargs)
            result = func(*args, **kwargs)
            if Graph.capturing is not None:
                Graph.capturing.record(func, args, kwargs, result)
            return result

    recorder: Any = Recorder
    recorder().__enter__()


def launch(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel as a graph sees it: one call, whatever PyTorch computes in it."""
    from torch.utils._python_dispatch import _disable_current_modes

    def launched(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            result = kernel(*args, **kwargs)
        if Graph.capturing is not None:
            Graph.capturing.record(kernel, args, kwargs, result)
        return result

    return launched


def install() -> None:
    os.environ.update(ENVIRONMENT)
    _install_platform()
    import vllm.v1.worker.cpu.shm  # noqa: F401  replaces streams, events and pinned memory

    del sys.modules["vllm.v1.worker.cpu.shm"]  # a start on a GPU is refused with it

    _install_torch()
    _install_triton()
    _install_kernels()
    _record_operations()


def _module(name: str, **attributes: Any) -> None:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__dict__.update(attributes)
    sys.modules[name] = module


def _install_platform() -> None:
    _module("vllm._C_stable_libtorch")
    from vllm import platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    def always(value: Any) -> Any:
        return staticmethod(lambda *_, **__: value)

    class CpuTensorPlatform(CudaPlatformBase):  # type: ignore[misc]
        """A Hopper GPU, the device of whose tensors is the CPU."""

        device_name, device_type, dispatch_key, dist_backend = "cpu", "cpu", "CPU", "gloo"
        get_device_capability = always(DeviceCapability(9, 0))
        get_device_name = always("no GPU")
        get_device_total_memory = always(MEMORY_BYTES)
        get_current_memory_usage = always(0)
        device_count = always(1)
        num_compute_units = always(132)
        manual_seed_all = always(None)
        is_pin_memory_available = always(False)
        is_integrated_gpu = always(False)
        graph_pool_handle = staticmethod(object)

        @classmethod
        def get_default_ir_op_priority(cls, vllm_config: Any) -> Any:
            from vllm.config.kernel import IrOpPriorityConfig

            return IrOpPriorityConfig.with_default(["native"])

        @classmethod
        def import_kernels(cls) -> None:
            from vllm.platforms.cpu import CpuPlatform

            CpuPlatform.import_kernels()

    platforms.vllm_version_matches_substr = lambda _: False
    platforms._current_platform = CpuTensorPlatform()


def _install_torch() -> None:
    import torch
    from vllm.utils import torch_utils

    replaced: Any = torch  # its attributes have other types
    replaced.cuda.CUDAGraph, replaced.cuda.graph = Graph, capture
    replaced.cuda.memory.get_allocator_backend = lambda: "none"
    replaced.cuda.get_device_properties = lambda *_: types.SimpleNamespace(L2_cache_size=2**12)
    replaced.accelerator.get_memory_info = lambda *_: (MEMORY_BYTES, MEMORY_BYTES)
    replaced.accelerator.memory_stats = lambda *_: {}
    for name in ("memory_reserved", "memory_allocated", "max_memory_allocated"):
        setattr(replaced.accelerator, name, lambda *_: 0)
    for name in ("reset_peak_memory_stats", "empty_host_cache"):
        setattr(replaced.accelerator, name, lambda *_: None)
    torch_utils.current_stream = torch.cuda.current_stream
    torch_utils.weak_ref_tensor = torch_utils.weak_ref_tensors = lambda tensors: tensors


def _install_triton() -> None:
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle

    def with_bool_mask(name: str, index: int) -> None:
        """A mask that is computed with a scalar is no bool in the interpreter."""
        method = getattr(InterpreterBuilder, name)

        def call(self: Any, *args: Any) -> Any:
            mask = TensorHandle(args[index].data.astype(bool), args[index].dtype)
            return method(self, *args[:index], mask, *args[index + 1 :])

        setattr(InterpreterBuilder, name, call)

    with_bool_mask("create_masked_load", 1)
    with_bool_mask("create_masked_store", 2)
    InterpretedFunction.run = launch(InterpretedFunction.run)


def _install_kernels() -> None:
    import torch

    from tests.kernels.flash_attention import flash_attn_varlen_func

    def scheduler_metadata(batch_size: int, **_: Any) -> torch.Tensor:
        return torch.zeros(1 + -(-batch_size // 4) * 16, dtype=torch.int32)

    _module(
        "vllm.vllm_flash_attn",
        __path__=[],
        flash_attn_varlen_func=launch(flash_attn_varlen_func),
        get_scheduler_metadata=launch(scheduler_metadata),
        compile_flash_attn_varlen_func_from_specs=None,
    )
    _module(
        "vllm.vllm_flash_attn.flash_attn_interface",
        is_fa_version_supported=lambda version: version == 3,
        fa_version_unsupported_reason=lambda _: "only version 3 is replaced",
    )
    # Nothing is compiled, and the passes of the compiler need compiled kernels.
    _module("vllm.compilation.passes.pass_manager", PostGradPassManager=object)
    from vllm import _custom_ops
    from vllm.v1.sample.ops import topk_topp_sampler

    _custom_ops.reshape_and_cache_flash = launch(_write_kv)
    for name in ("scaled_mm_supports_fp8", "scaled_mm_supports_block_fp8", "group_gemm_supported"):
        setattr(_custom_ops, f"cutlass_{name}", lambda _: False)
    # Triton's interpreter does not know some of its operations.
    topk_topp_sampler.apply_top_k_top_p_triton = topk_topp_sampler.apply_top_k_top_p_pytorch
    from vllm.v1.worker import gpu_worker

    gpu_worker.kernel_warmup = lambda worker: None  # compiles kernels for a GPU
    from vllm.device_allocator import cumem

    cumem.CuMemAllocator, cumem.cumem_available = Allocator, True


def _write_kv(key: Any, value: Any, keys: Any, values: Any, slots: Any, *_: Any) -> None:
    at = slots[slots >= 0]
    for new, cache in ((key, keys), (value, values)):
        cache[at // cache.shape[1], at % cache.shape[1]] = new[: len(slots)][slots >= 0]


class Allocator:
    """vLLM's allocator of memory that sleeps. It takes nothing away, and records the calls."""

    instance: "Allocator | None" = None

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.pointer_to_data: dict[int, Any] = {}

    @classmethod
    def get_instance(cls) -> "Allocator":
        cls.instance = cls.instance or cls()
        return cls.instance

    def use_memory_pool(self, tag: str | None = None) -> Any:
        return nullcontext()

    def cudagraph_pool(self) -> Any:
        return nullcontext()

    def get_current_usage(self) -> int:
        return 0

    def sleep(self, offload_tags: Any = None) -> None:
        self.calls.append("sleep")

    def discard(self, tags: Any) -> None:
        self.calls.append("discard")

    def wake_up(self, tags: Any = None) -> None:
        self.calls.append("wake_up")

    def release_pools(self) -> None:
        self.calls.append("release_pools")

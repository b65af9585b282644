"""A verl platform without an accelerator, which verl lacks: VERL_PLATFORM=cpu.

VERL_USE_EXTERNAL_MODULES imports it into every process. verl's trainers then run unmodified.
"""

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.utils import distributed

# Two Ray processes share one pretended GPU; its memory is never used.
_NOTHING = ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "synchronize", "set_device")
_ZERO = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")


def _device_module() -> types.ModuleType:
    """Replacement of torch.cuda in verl."""
    module = types.ModuleType("verl_cpu_device")
    for name in _NOTHING:
        setattr(module, name, lambda *_: None)
    for name in _ZERO:
        setattr(module, name, lambda *_: 0)
    more: dict[str, Any] = {
        "is_available": lambda: False,
        "current_device": lambda: torch.device("cpu"),
        "device_count": lambda: 1,
        "get_device_name": lambda *_: "CPU",
        "mem_get_info": lambda *_: (2**30, 2**30),
        "get_rng_state": torch.get_rng_state,
        "set_rng_state": torch.set_rng_state,
    }
    vars(module).update(more)
    return module


@PlatformRegistry.register(platform="cpu")
class PlatformCpu(PlatformBase):  # type: ignore[misc]
    device_name = vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        """The resource name with which verl requests GPUs from Ray."""
        return "GPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_gpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        pass


# Otherwise it would be cpu:gloo twice, which torch rejects.
distributed.initialize_global_process_group_ray = functools.partial(
    distributed.initialize_global_process_group_ray, backend="cpu:gloo"
)

"""Registration of host memory with CUDA, and background threads for KV copies."""

import mmap
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, ParamSpec, TypeVar

import torch
from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

from engine.kv_transfer.worker.mapped_arena import HostMemoryRegistry
from engine.runtime.feature_guard import Failure, attempt

P = ParamSpec("P")
T = TypeVar("T")
PORTABLE: Final = 1  # cudaHostRegisterPortable: registered for all threads and devices


class WorkThread:
    """Daemon thread that does work in the order of submission.

    The device is set first: a CUDA call of a thread without one creates a context on device 0.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._num_pending = 0
        threading.Thread(target=self._run, daemon=True, name="prompt-kv").start()

    def submit(self, work: Callable[[], None]) -> None:
        with self._changed:
            self._num_pending += 1
        self._queue.put(work)

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Result of a function that the thread calls after all earlier work."""
        future: Future[T | Failure] = Future()
        self.submit(lambda: future.set_result(attempt(function, *args, **kwargs)))
        result = future.result()
        if isinstance(result, Failure):
            raise RuntimeError(result.message)
        return result

    def flush(self) -> None:
        """Wait until all submitted work is done."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_pending == 0)

    def _run(self) -> None:
        if self._device.type == "cuda":
            attempt(torch.cuda.set_device, self._device)
        while True:
            attempt(self._queue.get())  # keeps no reference to the work while it waits
            with self._changed:
                self._num_pending -= 1
                self._changed.notify_all()


class CudaHostMemory:
    """Registration of host memory with the CUDA driver.

    A refused call leaves an error in its thread that the thread's next kernel launch would raise.
    So all calls are made by a thread that launches no kernel.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread = WorkThread(device)

    def register(self, address: int, num_bytes: int) -> None:
        result = self._thread.call(_cudart().cudaHostRegister, address, num_bytes, PORTABLE)
        if result.value:
            raise RuntimeError(f"cudaHostRegister failed: {result}")

    def unregister(self, address: int) -> None:
        """Unregister memory after all work of the GPU that may read it."""
        self._thread.call(torch.cuda.synchronize, self._device)
        self._thread.call(_cudart().cudaHostUnregister, address)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def registration_failure(registry: HostMemoryRegistry) -> str | None:
    """Reason why shared memory cannot be registered, tried with one page; None if it can be."""
    return _try_page(registry, lambda page: None)


def direct_read_failure(registry: HostMemoryRegistry) -> str | None:
    """Reason why kernels cannot read registered memory at its host address; None if they can."""
    return _try_page(registry, _address_failure)


def _try_page(
    registry: HostMemoryRegistry, check: Callable[[torch.Tensor], str | None]
) -> str | None:
    page = torch.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=torch.uint8)
    try:
        registry.register(page.data_ptr(), mmap.PAGESIZE)
    except RuntimeError as error:
        return str(error)
    try:
        return check(page)
    finally:
        registry.unregister(page.data_ptr())


def _address_failure(page: torch.Tensor) -> str | None:
    view = get_accelerator_view_from_cpu_tensor(page)
    return None if view.data_ptr() == page.data_ptr() else "the GPU has other addresses for it"

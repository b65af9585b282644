"""Copies that a publication could be made of, at the size of 8B parameters in bfloat16.

    python -m bench.gpu.copies --results FILE [--rehearse]

GB/s of one direction; a copy within the GPU reads and writes as many bytes. Host memory is private,
or a file in shared memory, and registered with the driver at once, which pins it. It has a quarter
of the model's tensors, since it takes seconds to allocate and the rate does not depend on its size.
"""

import argparse
import math
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from bench.gpu.jobs import write_json
from bench.gpu.models import ON_GPU, REHEARSAL
from bench.harness.random_model import SHAPES, tensor_shapes

BYTES_PER_VALUE: Final = 2
PIECE_BYTES: Final = 2**26
HOST_SHARE: Final = 4
PAGE_BYTES: Final = 2**16
"""Bytes of a KV block of 16 tokens of one layer with eight heads of 128."""
REPEATS: Final = 2
NOT_ON_CPU: Final = "pinned memory: not on a CPU"


class Copies:
    """Memory of a model's size on the device, in tensors of the model's sizes."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.sizes, self.device, self.num_bytes = sizes, device, sum(sizes)
        self.there = self._bytes()
        self.tensors = split(self.there, list(sizes))

    def _bytes(self) -> torch.Tensor:
        return torch.zeros(self.num_bytes, dtype=torch.uint8, device=self.device)

    def rate(self, copy: Callable[[], object]) -> float:
        """GB/s of the faster one of some copies, after one that is not counted."""
        return self.num_bytes / min(self.seconds(copy) for _ in range(1 + REPEATS)) / 1e9

    def seconds(self, copy: Callable[[], object]) -> float:
        self._synchronize()
        began = time.perf_counter()
        copy()
        self._synchronize()
        return time.perf_counter() - began

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def from_host(self, host: torch.Tensor, name: str) -> Iterator[tuple[str, float]]:
        pieces = list(zip(split(self.there, PIECE_BYTES), split(host, PIECE_BYTES), strict=True))
        tensors = list(zip(self.tensors, split(host, list(self.sizes)), strict=True))
        yield f"{name}, pieces of 64 MiB, GB/s", self.rate(lambda: copy_each(pieces))
        yield f"{name}, tensors, GB/s", self.rate(lambda: copy_each(tensors))

    def within(self) -> Iterator[tuple[str, float]]:
        other = self._bytes()
        others = list(split(other, list(self.sizes)))
        pairs = list(zip(others, self.tensors, strict=True))
        yield "within the GPU, tensors, GB/s", self.rate(lambda: copy_each(pairs))
        both = others, list(self.tensors)
        yield "within the GPU, foreach, GB/s", self.rate(lambda: torch._foreach_copy_(*both))
        num_pages = self.num_bytes // PAGE_BYTES
        pages, out = (m[: num_pages * PAGE_BYTES].view(num_pages, -1) for m in (other, self.there))
        order = torch.randperm(num_pages, device=self.device)
        gather = self.rate(lambda: torch.index_select(pages, 0, order, out=out))
        yield "within the GPU, pages of 64 KiB in random order, GB/s", gather


def split(memory: torch.Tensor, sizes: int | list[int]) -> tuple[torch.Tensor, ...]:
    parts: tuple[torch.Tensor, ...] = memory.split(sizes)  # type: ignore[no-untyped-call]
    return parts


def copy_each(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source, non_blocking=True)


@contextmanager
def registered(num_bytes: int, file: int) -> Iterator[torch.Tensor]:
    """Memory of a file, or private memory for the number -1, registered with the driver."""
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    memory = torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)
    result = cudart.cudaHostRegister(memory.data_ptr(), num_bytes, 0)
    assert not result.value, f"cudaHostRegister failed: {result}"
    try:
        yield memory
    finally:
        cudart.cudaHostUnregister(memory.data_ptr())


def measure_pinned(copies: Copies) -> Iterator[tuple[str, float]]:
    began = time.perf_counter()
    with registered(copies.num_bytes, -1) as memory:
        seconds = time.perf_counter() - began
        yield "pinned memory, GB/s of its allocation", copies.num_bytes / seconds / 1e9
        yield from copies.from_host(memory, "pinned memory")
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="coppice-bench-") as file:
        os.posix_fallocate(file.fileno(), 0, copies.num_bytes)
        began = time.perf_counter()
        with registered(copies.num_bytes, file.fileno()) as memory:
            seconds = time.perf_counter() - began
            yield "registered file, GB/s of its registration", copies.num_bytes / seconds / 1e9
            yield from copies.from_host(memory, "registered file")


def measure(sizes: Sequence[int], device: torch.device) -> Iterator[tuple[str, float]]:
    yield "bytes", sum(sizes)
    yield from Copies(sizes, device).within()
    copies = Copies(sizes[: len(sizes) // HOST_SHARE], device)
    if device.type == "cuda":
        yield from measure_pinned(copies)
    else:
        yield from copies.from_host(torch.zeros_like(copies.there), "pageable memory")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    shape = (REHEARSAL if given.rehearse else ON_GPU).published
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, float | str] = {} if device.type == "cuda" else {"not possible": NOT_ON_CPU}
    sizes = [BYTES_PER_VALUE * math.prod(each) for _, each in tensor_shapes(SHAPES[shape])]
    for name, value in measure(sizes, device):
        found[name] = value
        write_json(given.results, found)
        print(f"{name}: {value:.4g}", flush=True)


if __name__ == "__main__":
    main()

"""Lazy torch tensors of a checkpoint file: only the used slice is read.

Under tensor, pipeline or expert parallelism a rank uses a part of the checkpoint. vLLM's weight
loaders take that part with views of the whole tensor, such as `narrow`. A FileTensor records these
views without reading. Only the bytes of the final view are read, when it is copied to a parameter.

vLLM runs each loader twice: with parameters on the meta device, to count the elements, and, when
the layer is complete, with real ones. The first run starts the read in a thread. The views that a
load used are remembered, so that the next load reads the following tensor ahead as well.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_map_only

from engine.weights.checkpoint import Checkpoint, StoredTensor, read_ranges

TORCH_DTYPES: Final = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
MIN_RANGE_BYTES: Final = 2048  # shorter ranges are read together with the bytes between them
NUM_THREADS: Final = 4

aten = torch.ops.aten
VIEW_OPS: Final = frozenset(
    {
        *(aten.alias.default, aten.detach.default, aten.view.default, aten.unsqueeze.default),
        *(aten.squeeze.default, aten.squeeze.dim, aten.t.default, aten.transpose.int),
        *(aten.permute.default, aten.select.int, aten.slice.Tensor, aten.split.Tensor),
    }
)


class View(NamedTuple):
    """Geometry of a view of a tensor, in elements of `itemsize` bytes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    itemsize: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "View":
        offset = int(tensor.storage_offset())
        return cls(tuple(tensor.shape), tensor.stride(), offset, tensor.itemsize)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


class TensorFile:
    """One stored tensor and the reads of its views, each done at most once.

    `used` collects the views that the caller read.
    """

    def __init__(
        self, stored: StoredTensor, threads: ThreadPoolExecutor, used: list[View], *, pinned: bool
    ) -> None:
        self.stored = stored
        self.dtype = TORCH_DTYPES[stored.dtype]
        self._used = used
        self._threads = threads
        self._pinned = pinned
        self._reads: dict[View, Future[torch.Tensor]] = {}

    def read_ahead(self, view: View) -> Future[torch.Tensor]:
        if view not in self._reads:
            self._reads[view] = self._threads.submit(read_view, self.stored, view, self._pinned)
        return self._reads[view]

    def read(self, view: View) -> Future[torch.Tensor]:
        if view not in self._used:
            self._used.append(view)
        return self.read_ahead(view)

    @property
    def whole(self) -> torch.Tensor:
        """Tensor on the meta device with the stored tensor's geometry."""
        return torch.empty(self.stored.shape, dtype=self.dtype, device="meta")


class FileTensor(torch.Tensor):
    """Tensor on the CPU whose values are in a file until an operation needs them.

    `layout_of` is a tensor on the meta device with the geometry of this view.
    """

    source: TensorFile
    layout_of: torch.Tensor

    @staticmethod
    def __new__(cls, source: TensorFile, layout_of: torch.Tensor) -> "FileTensor":
        tensor: FileTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            layout_of.shape,
            layout_of.stride(),
            layout_of.storage_offset(),
            dtype=layout_of.dtype,
            device=torch.device("cpu"),
        )
        tensor.source, tensor.layout_of = source, layout_of
        return tensor

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FileTensor({self.source.stored.name!r}, shape={tuple(self.shape)})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        first = args[0]
        if func in VIEW_OPS and isinstance(first, FileTensor):
            return first._view(func(first.layout_of, *args[1:], **(kwargs or {})))
        if func is aten.copy_.default and first.is_meta and isinstance(args[1], FileTensor):
            args[1].source.read(View.of(args[1].layout_of))
            return first
        args, kwargs = tree_map_only(
            FileTensor, FileTensor.values_read, (tuple(args), dict(kwargs or {}))
        )
        return func(*args, **kwargs)

    def _view(self, layout: Any) -> Any:
        if isinstance(layout, torch.Tensor):
            return FileTensor(self.source, layout)
        return type(layout)(self._view(part) for part in layout)

    def values_read(self) -> torch.Tensor:
        return self.source.read(View.of(self.layout_of)).result()


def read_view(stored: StoredTensor, view: View, pinned: bool) -> torch.Tensor:
    """Read a view of a stored tensor. The result has the view's shape, and its order of strides."""
    dtype = TORCH_DTYPES[stored.dtype]
    order = sorted(range(len(view.shape)), key=lambda dim: -view.stride[dim])
    shape = [view.shape[dim] for dim in order]
    starts, length = _ranges(shape, [view.stride[dim] for dim in order], view.offset)
    if len(starts) > 1 and length * view.itemsize < MIN_RANGE_BYTES:
        return _read_strided(stored, view, pinned)
    flat = _empty(math.prod(shape), dtype, pinned)
    if view.num_bytes:
        read_ranges(stored, (starts * view.itemsize).tolist(), _bytes_of(flat))
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return flat.reshape(shape).permute(inverse)


def _ranges(
    shape: Sequence[int], stride: Sequence[int], offset: int
) -> tuple[NDArray[np.int64], int]:
    """First elements of a view's contiguous ranges, in ascending order, and their common length."""
    length, dim = 1, len(shape)
    while dim and (stride[dim - 1] == length or shape[dim - 1] == 1):
        dim -= 1
        length *= shape[dim]
    starts = np.array([offset], np.int64)
    for size, step in zip(shape[:dim], stride[:dim], strict=True):
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * step).ravel()
    return starts, length


def _read_strided(stored: StoredTensor, view: View, pinned: bool) -> torch.Tensor:
    """Read from a view's first to its last element, and copy the view's elements out of these."""
    last = sum((size - 1) * step for size, step in zip(view.shape, view.stride, strict=True))
    covering = _empty(last + 1, TORCH_DTYPES[stored.dtype], pinned=False)
    read_ranges(stored, [view.offset * view.itemsize], _bytes_of(covering))
    found = _empty(math.prod(view.shape), covering.dtype, pinned).reshape(view.shape)
    return found.copy_(covering.as_strided(view.shape, view.stride))


def _bytes_of(flat: torch.Tensor) -> memoryview:
    return flat.view(torch.uint8).numpy().data


def _empty(num_elements: int, dtype: torch.dtype, pinned: bool) -> torch.Tensor:
    # Explicitly on the CPU: a reload makes the GPU the default device.
    return torch.empty(num_elements, dtype=dtype, device="cpu", pin_memory=pinned)


class WeightsReader:
    """Reader of one rank's part of checkpoints.

    `reads_all`: the rank uses every tensor as a whole, so the first load reads ahead, too.
    """

    def __init__(self, *, pinned: bool, reads_all: bool) -> None:
        self._pinned = pinned
        self._reads_all = reads_all
        self._used: dict[str, list[View]] = {}

    @contextmanager
    def open(self, checkpoint: Checkpoint) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        """Context manager of a load: a checkpoint's tensors by name, those of a layer adjacent.

        Each has memory of its own, because vLLM refers to the tensors of a layer until the layer is
        complete.
        """
        threads = ThreadPoolExecutor(NUM_THREADS, "read-weights")
        try:
            yield self._tensors(checkpoint, threads)
        finally:
            threads.shutdown(cancel_futures=True)

    def _tensors(
        self, checkpoint: Checkpoint, threads: ThreadPoolExecutor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        used_before, self._used = self._used, {}
        following: TensorFile | None = None
        for _, stored in sorted(checkpoint.tensors.items()):
            used = self._used.setdefault(stored.name, [])
            source = TensorFile(stored, threads, used, pinned=self._pinned)
            for view in self._views_to_read(source, used_before):
                source.read_ahead(view)
            if following is not None:
                yield following.stored.name, FileTensor(following, following.whole)
            following = source
        if following is not None:
            yield following.stored.name, FileTensor(following, following.whole)

    def _views_to_read(self, source: TensorFile, used: Mapping[str, list[View]]) -> list[View]:
        everything = [View.of(source.whole)] if self._reads_all else []
        return used.get(source.stored.name, everything)

    @property
    def num_bytes(self) -> int:
        """Number of bytes that the last load used."""
        return sum(view.num_bytes for views in self._used.values() for view in views)

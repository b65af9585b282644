"""Distance between texts, as the norm of the difference of their value tensors.

Both texts are prefilled alone. The norm is over all layers, heads, channels and the tokens of the
first text. The tensors are read from the span cache's arena, where both must be pinned. Each pair
is compared once: an export name always denotes the same KV.
"""

import asyncio
import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from engine.kv_types import ExportSlot, KvFormat
from service.kv_reuse.store import SegmentCache

MAX_CACHED_PAIRS = 2**16

Pair = tuple[ExportSlot, ExportSlot]
Floats = npt.NDArray[np.float32]


class DistanceCache:
    """Cache of distances, and the thread that computes them; runs on one event loop."""

    def __init__(self, store: SegmentCache) -> None:
        self._store = store
        self._cache: OrderedDict[tuple[str | None, str | None], float] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="texts-compared")

    async def get_distances(self, pairs: Iterable[Pair]) -> dict[Pair, float]:
        """Distances of the pairs; cancelling it stops the computation after the current pair."""
        distances: dict[Pair, float] = {}
        unknown = []
        for pair in dict.fromkeys(pairs):
            if _cache_key(pair) in self._cache:
                distances[pair] = self._cache[_cache_key(pair)]
            else:
                unknown.append(pair)
        if unknown:
            distances |= zip(unknown, await self._compute(unknown), strict=True)
        self._remember({pair: distances[pair] for pair in unknown})
        return distances

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _compute(self, pairs: Sequence[Pair]) -> list[float]:
        view, kv_format, is_cancelled = self._store.view, self._store.kv_format, threading.Event()

        def compare() -> list[float]:
            return [distance(view, kv_format, *pair) for pair in pairs if not is_cancelled.is_set()]

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, compare)
        finally:
            is_cancelled.set()

    def _remember(self, found: Mapping[Pair, float]) -> None:
        for pair, far in found.items():
            self._cache[_cache_key(pair)] = far
        while len(self._cache) > MAX_CACHED_PAIRS:
            self._cache.popitem(last=False)


def distance(view: memoryview, kv_format: KvFormat, text: ExportSlot, other: ExportSlot) -> float:
    """Distance over the tokens of `text`; one layer at a time is held in float32."""
    total = 0.0
    for layer in range(kv_format.num_layers):
        ours = _values(view, kv_format, text, layer)
        theirs = _values(view, kv_format, other, layer)[:, : text.num_tokens]
        difference = ours[:, : theirs.shape[1]] - theirs
        total += float(np.square(difference, dtype=np.float64).sum())
    return math.sqrt(total)


def _values(view: memoryview, kv_format: KvFormat, slot: ExportSlot, layer: int) -> Floats:
    """Values of one layer in float32, shape [num_kv_heads, num_tokens, head_dim]."""
    dtype = np.dtype(
        "<u2" if kv_format.dtype == "bfloat16" else f"<f{_ITEM_BYTES[kv_format.dtype]}"
    )
    shape = (kv_format.num_kv_heads, slot.num_tokens, kv_format.head_dim)
    count = kv_format.num_kv_heads * slot.num_tokens * kv_format.head_dim
    offset = slot.offset + (2 * layer + 1) * count * dtype.itemsize
    raw = np.frombuffer(view, dtype=dtype, count=count, offset=offset).reshape(shape)
    if kv_format.dtype != "bfloat16":
        return raw.astype(np.float32)
    return (raw.astype(np.uint32) << 16).view(np.float32)


def _cache_key(pair: Pair) -> tuple[str | None, str | None]:
    return pair[0].name, pair[1].name


_ITEM_BYTES = {"float32": 4, "float16": 2}

"""Lookup of the captured shape that serves a step.

vLLM 0.32 considers only shapes of the next captured number of tokens. If those have another query
length it falls back to a mixed graph, even if the next larger size has the right length
(https://github.com/vllm-project/vllm/pull/56136). A plan has a sorted list of sizes per query
length instead.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Protocol

from engine.cudagraphs.shape import GraphShape, mixed


class GraphLookup(Protocol):
    """Finds the captured shape for a requested one; None if no shape fits."""

    def find(self, requested: GraphShape) -> GraphShape | None: ...


class PerLengthLookup:
    """Finds the smallest shape of the same query length that fits."""

    def __init__(self, shapes: Iterable[GraphShape]) -> None:
        self._sizes_by_query: dict[int | None, list[int]] = defaultdict(list)
        for shape in sorted(shapes, key=lambda shape: shape.tokens):
            self._sizes_by_query[shape.query_len].append(shape.tokens)

    def find(self, requested: GraphShape) -> GraphShape | None:
        return _next(self._sizes_by_query.get(requested.query_len, []), requested)


class VllmLookup:
    """Lookup as in vLLM 0.32."""

    def __init__(self, shapes: Collection[GraphShape]) -> None:
        self._decode = {shape for shape in shapes if shape.query_len is not None}
        self._levels = sorted({shape.tokens for shape in self._decode})
        self._mixed = PerLengthLookup(shape for shape in shapes if shape.query_len is None)

    def find(self, requested: GraphShape) -> GraphShape | None:
        if requested.query_len is None:
            return self._mixed.find(mixed(requested.tokens))
        found = _next(self._levels, requested)
        return found if found in self._decode else None


def _next(levels: list[int], requested: GraphShape) -> GraphShape | None:
    index = bisect_left(levels, requested.tokens)
    return GraphShape(levels[index], requested.query_len) if index < len(levels) else None

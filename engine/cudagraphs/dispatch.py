"""Which captured shape serves a step.

vLLM 0.32 looks only among the shapes of the next captured number of tokens; where those have
another length, it takes a mixed graph, though the right one may be one number further
(https://github.com/vllm-project/vllm/pull/56136). A plan's candidates are a ladder for each length.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Protocol

from engine.cudagraphs.shape import Shape, mixed


class Lookup(Protocol):
    def find(self, asked: Shape) -> Shape | None: ...


class Ladder:
    """The smallest shape of the same length that has room."""

    def __init__(self, shapes: Iterable[Shape]) -> None:
        self._rungs: dict[int | None, list[int]] = defaultdict(list)
        for shape in sorted(shapes, key=lambda shape: shape.tokens):
            self._rungs[shape.query].append(shape.tokens)

    def find(self, asked: Shape) -> Shape | None:
        return _next(self._rungs.get(asked.query, []), asked)


class NextTokens:
    """As vLLM 0.32 looks."""

    def __init__(self, shapes: Collection[Shape]) -> None:
        self._decode = {shape for shape in shapes if shape.query is not None}
        self._levels = sorted({shape.tokens for shape in self._decode})
        self._mixed = Ladder(shape for shape in shapes if shape.query is None)

    def find(self, asked: Shape) -> Shape | None:
        if asked.query is None:
            return self._mixed.find(mixed(asked.tokens))
        found = _next(self._levels, asked)
        return found if found in self._decode else None


def _next(levels: list[int], asked: Shape) -> Shape | None:
    place = bisect_left(levels, asked.tokens)
    return Shape(levels[place], asked.query) if place < len(levels) else None

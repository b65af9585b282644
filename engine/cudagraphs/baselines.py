"""What others capture, as sets of shapes to compare a plan with.

`product` is vLLM 0.32's second model runner (`v1/worker/gpu/cudagraph_utils.py`, with the sizes of
`config/vllm.py`): every size with every length. A test holds it to vLLM's own code. `bucketed` is
TLT's pool (arXiv 2511.16665): every size, but a length only where it may be chosen; its graphs for
no drafts are not trimmed.
"""

from dataclasses import dataclass
from itertools import pairwise

from engine.cudagraphs.draft_lengths import Lengths
from engine.cudagraphs.shape import Shape, decode, mixed

CEILING_TOKENS = 512  # vLLM's, but for data-centre Blackwells


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the engine is started with."""

    lengths: Lengths
    max_sequences: int
    max_batched_tokens: int

    @property
    def widest(self) -> int:
        return self.lengths.queries[-1]

    def most_samples(self, query: int) -> int:
        """With so many tokens each."""
        return min(self.max_sequences, self.max_batched_tokens // query)


def vllm_sizes(limits: Limits) -> list[int]:
    """The tokens that vLLM captures graphs for when it is not told."""
    top = min(limits.max_sequences * limits.widest * 2, CEILING_TOKENS)
    uniform = _uniform_sizes(limits, top)
    top = min(limits.max_batched_tokens, top)
    sizes = {*_grid(top), *uniform}
    if limits.max_batched_tokens <= top:
        sizes.add(limits.max_batched_tokens)
    return sorted(size for size in sizes if size <= limits.max_batched_tokens)


def _uniform_sizes(limits: Limits, top: int) -> set[int]:
    if limits.widest == 1:
        return {limits.max_sequences} if limits.max_sequences <= top else set()
    sizes = set()
    for query in limits.lengths.queries:
        samples = max(limits.lengths.samples(query, limits.max_sequences), default=0)
        samples = min(samples, CEILING_TOKENS)
        counts = {n for n in (*_grid(samples), samples) if n}
        sizes |= {n * query for n in counts if n * query <= top}
    return sizes


def _grid(top: int) -> list[int]:
    steps = (1, 2, 4, *range(8, 256, 8), *range(256, top + 1, 16))
    return [size for size in steps if size <= top]


def product(limits: Limits, sizes: list[int] | None = None) -> frozenset[Shape]:
    sizes = vllm_sizes(limits) if sizes is None else sizes
    shapes = {mixed(size) for size in sizes}
    for size in sizes:
        for query in limits.lengths.queries:
            samples = -(-size // query)
            if samples <= limits.max_sequences and samples * query <= sizes[-1]:
                shapes.add(decode(samples, query))
    return frozenset(shapes)


def bucketed(limits: Limits) -> frozenset[Shape]:
    shapes = product(limits)
    return frozenset(shape for shape in shapes if _in_its_bucket(shape, shapes, limits))


def _in_its_bucket(shape: Shape, shapes: frozenset[Shape], limits: Limits) -> bool:
    """Whether some number of samples that may decode so is padded to just this shape."""
    if shape.query is None or shape.query == 1:
        return True
    counts = sorted({0} | {s.samples for s in shapes if s.query == shape.query})
    below = next(low for low, high in pairwise(counts) if high == shape.samples)
    allowed = limits.lengths.samples(shape.query, shape.samples)
    return any(samples > below for samples in allowed)

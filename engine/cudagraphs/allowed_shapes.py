"""Limits on CUDA graph shapes, and the shapes captured by vLLM and by TLT (arXiv 2511.16665)."""

from dataclasses import dataclass
from itertools import pairwise

from engine.cudagraphs.draft_lengths import DraftLengthTiers
from engine.cudagraphs.shapes import GraphShape, decode, mixed

CEILING_TOKENS = 512  # vLLM's limit, except on data-center Blackwell GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureLimits:
    """Engine limits that bound the shapes of the CUDA graphs to capture."""

    lengths: DraftLengthTiers
    max_sequences: int
    max_batched_tokens: int

    @property
    def max_query_len(self) -> int:
        return self.lengths.query_lens[-1]

    def max_samples(self, query_len: int) -> int:
        """Maximum number of samples in a decode step with `query_len` tokens each."""
        return min(self.max_sequences, self.max_batched_tokens // query_len)


def vllm_sizes(limits: CaptureLimits) -> list[int]:
    """CUDA graph sizes, in tokens, that vLLM captures by default."""
    top = min(limits.max_sequences * limits.max_query_len * 2, CEILING_TOKENS)
    uniform = _uniform_sizes(limits, top)
    top = min(limits.max_batched_tokens, top)
    sizes = {*_grid(top), *uniform}
    if limits.max_batched_tokens <= top:
        sizes.add(limits.max_batched_tokens)
    return sorted(size for size in sizes if size <= limits.max_batched_tokens)


def _uniform_sizes(limits: CaptureLimits, top: int) -> set[int]:
    if limits.max_query_len == 1:
        return {limits.max_sequences} if limits.max_sequences <= top else set()
    sizes = set()
    for query_len in limits.lengths.query_lens:
        samples = max(limits.lengths.samples(query_len, limits.max_sequences), default=0)
        samples = min(samples, CEILING_TOKENS)
        counts = {n for n in (*_grid(samples), samples) if n}
        sizes |= {n * query_len for n in counts if n * query_len <= top}
    return sizes


def _grid(top: int) -> list[int]:
    steps = (1, 2, 4, *range(8, 256, 8), *range(256, top + 1, 16))
    return [size for size in steps if size <= top]


def vllm_shapes(limits: CaptureLimits, sizes: list[int] | None = None) -> frozenset[GraphShape]:
    """CUDA graph shapes that the second model runner of vLLM 0.32 captures.

    It captures every size with every draft length (`v1/worker/gpu/cudagraph_utils.py`, with the
    sizes of `config/vllm.py`). A test compares this with vLLM's own code.
    """
    sizes = vllm_sizes(limits) if sizes is None else sizes
    shapes = {mixed(size) for size in sizes}
    for size in sizes:
        for query_len in limits.lengths.query_lens:
            samples = -(-size // query_len)
            if samples <= limits.max_sequences and samples * query_len <= sizes[-1]:
                shapes.add(decode(samples, query_len))
    return frozenset(shapes)


def tlt_shapes(limits: CaptureLimits) -> frozenset[GraphShape]:
    """CUDA graph shapes that TLT would capture (arXiv 2511.16665).

    It captures every size, but each draft length only for the numbers of samples with which it may
    be chosen. Its graphs without drafts are not reduced.
    """
    shapes = vllm_shapes(limits)
    return frozenset(shape for shape in shapes if _is_reachable(shape, shapes, limits))


def _is_reachable(shape: GraphShape, shapes: frozenset[GraphShape], limits: CaptureLimits) -> bool:
    """Return whether some batch that may use this query length is padded to exactly this shape."""
    if shape.query_len is None or shape.query_len == 1:
        return True
    counts = sorted({0} | {s.samples for s in shapes if s.query_len == shape.query_len})
    below = next(low for low, high in pairwise(counts) if high == shape.samples)
    allowed = limits.lengths.samples(shape.query_len, shape.samples)
    return any(samples > below for samples in allowed)

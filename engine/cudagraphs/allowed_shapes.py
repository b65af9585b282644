"""Limits on CUDA graph shapes, and the shapes that vLLM and TLT capture within these limits."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from engine.cudagraphs.shapes import GraphShape, decode, mixed

MAX_DRAFT_TOKENS = 127  # vLLM's MAX_SPEC_LEN - 1
_TEXT = re.compile(r"(\d+:\d+(,\d+)* )*\d+(,\d+)*")


@dataclass(frozen=True, slots=True)
class Tier:
    """Allowed draft lengths with up to `up_to` running samples; None means unbounded."""

    up_to: int | None
    drafts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DraftLengthTiers:
    """Draft lengths that may be chosen, by the number of running samples.

    Written as `8:0,2,4 32:0,2 0`: with up to 8 samples 0, 2 or 4 draft tokens, with up to 32
    samples 0 or 2, above that none. Tiers are in increasing order of samples; the last one is
    unbounded.
    """

    tiers: tuple[Tier, ...]

    @classmethod
    def parse(cls, text: str) -> "DraftLengthTiers":
        """Parse tiers from text; raises ValueError with the reason if it is invalid."""
        if not _TEXT.fullmatch(text):
            raise ValueError("must be written as 8:0,2,4 32:0,2 0")
        tiers = tuple(_tier(part) for part in text.split(" "))
        bounds = [tier.up_to for tier in tiers if tier.up_to is not None]
        if 0 in bounds or any(b >= a for b, a in zip(bounds, bounds[1:], strict=False)):
            raise ValueError("numbers of samples must be increasing and at least 1")
        if max(max(tier.drafts) for tier in tiers) > MAX_DRAFT_TOKENS:
            raise ValueError(f"a draft has at most {MAX_DRAFT_TOKENS} tokens")
        return cls(tiers)

    @property
    def query_lens(self) -> tuple[int, ...]:
        """Possible numbers of tokens per sample in a decode step, in increasing order."""
        return tuple(sorted({drafts + 1 for tier in self.tiers for drafts in tier.drafts}))

    def at(self, samples: int) -> tuple[int, ...]:
        return next(t.drafts for t in self.tiers if t.up_to is None or samples <= t.up_to)

    def samples(self, query_len: int, most: int) -> Iterator[int]:
        """Yield the numbers of samples, up to `most`, that may decode `query_len` tokens each."""
        return (n for n in range(1, most + 1) if query_len - 1 in self.at(n))


def default_tiers(max_draft_tokens: int) -> DraftLengthTiers:
    """Default draft lengths: few lengths, and only short ones with many running samples."""
    few = {0, max_draft_tokens} | {
        drafts for drafts in (1, 2, 4, 8, 16, 32, 64) if drafts < max_draft_tokens
    }
    return DraftLengthTiers(
        tuple(
            Tier(up_to, tuple(sorted(drafts for drafts in few if drafts <= most)))
            for up_to, most in ((8, max_draft_tokens), (32, 4), (None, 2))
        )
    )


def _tier(text: str) -> Tier:
    up_to, _, drafts = text.rpartition(":")
    return Tier(
        int(up_to) if up_to else None,
        tuple(sorted({int(d) for d in drafts.split(",")})),
    )


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

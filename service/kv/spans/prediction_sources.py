"""Selection of the earlier prompts from which the KV of a new prompt is predicted.

A prompt is divided into sections (see PromptTemplate). If an observation has the same text up to
and including a section, the section's KV is taken from it, because it equals the prompt's own. Any
other section is predicted from observations whose same section is at least as long. They are
shareable, that is, good enough for a prediction, if some of them are much nearer than the others:
if the entropy of their similarity weights is low (KVCOMM, arXiv 2510.12872).
"""

import asyncio
import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from coppice.safetensors_io import CODES, FLOAT_BYTES
from engine.types.kv import ExportSlot, KvFormat
from service.kv.spans.index import SpanIndex
from service.kv.spans.observations import Observation
from service.kv.spans.prompt_template import PromptTemplate

MAX_OBSERVATIONS_PER_SECTION = 4
"""Maximum number of observations, the nearest, from which one section of a prompt is predicted.

An observation is read once per section predicted from it.
"""
USED_WEIGHT_SHARE = 0.9
DistanceMap = Mapping[tuple[int, Observation], float]
"""Distances of a prompt's texts to those of observations, by keyed section and observation."""
MAX_CACHED_PAIRS = 2**16
Pair = tuple[ExportSlot, ExportSlot]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionCandidates:
    """Observations that can provide the KV of one section of a prompt.

    `exact_match` is an observation with the same texts up to this section. Without one,
    `observations` are the candidates for a prediction. A section without cache key has the
    candidates and distances of the preceding section with one, number `compared_section`.
    """

    exact_match: Observation | None
    observations: Sequence[Observation]
    compared_section: int


@dataclass(slots=True, kw_only=True)
class PredictionSources:
    """Observations selected for each section of a prompt, with their weights.

    `weights` has one entry per section, empty for exact matches. `exact_tokens` is the length of
    the prompt's prefix with exact KV. `used` are the exact matches of keyed sections, and the
    observations with most of the weight of a predicted section. `sources` are all that are read.
    """

    weights: list[dict[Observation, float]] = field(default_factory=list)
    exact_tokens: int = 0
    used: set[Observation] = field(default_factory=set)
    sources: set[Observation] = field(default_factory=set)


def find_candidates(
    template: PromptTemplate, observations: Sequence[Observation]
) -> list[SectionCandidates] | None:
    """Find observations that can provide each prompt section; None if too few can.

    A section after the last one with a cache key is left out, and prefilled, unless all candidates
    have the same text there.
    """
    found: list[SectionCandidates] = []
    compared, candidates = 0, list(observations)
    for index, section in enumerate(template.sections):
        long = [each for each in observations if _has_section(each, index, section.num_tokens)]
        exact_match = [each for each in long if each.template.has_same_prefix(template, index + 1)]
        if section.cache_key is not None:
            compared, candidates = index, long
        elif not exact_match and not all(
            _has_same_text(each, index, section.text_digest) for each in candidates
        ):
            break
        if not exact_match and len(candidates) < 2:
            return None
        last = exact_match[-1] if exact_match else None
        found.append(
            SectionCandidates(
                exact_match=last,
                observations=[] if exact_match else candidates,
                compared_section=compared,
            )
        )
    return found


def pairs_to_compare(
    template: PromptTemplate, found: Sequence[SectionCandidates]
) -> Iterator[tuple[int, Observation]]:
    for index, candidates in enumerate(found):
        if template.sections[index].cache_key is not None:
            yield from ((index, observed) for observed in candidates.observations)


def select_observations(
    template: PromptTemplate,
    found: Sequence[SectionCandidates],
    distances: DistanceMap,
    max_entropy: float,
) -> PredictionSources | None:
    """Choose and weight observations per section; None if one cannot be predicted."""
    selection = PredictionSources(exact_tokens=_exact_tokens(template, found))
    for section, candidates in zip(template.sections, found, strict=False):
        if candidates.exact_match is not None:
            selection.weights.append({})
            selection.sources.add(candidates.exact_match)
            selection.used |= set() if section.cache_key is None else {candidates.exact_match}
            continue
        observations = candidates.observations
        section_distances = [distances[candidates.compared_section, each] for each in observations]
        if not are_shareable(_distance_by_text(candidates, section_distances), max_entropy):
            return None
        weights_by_distance = similarity_weights(section_distances)
        ranked = sorted(
            zip(weights_by_distance, observations, strict=True), key=lambda pair: -pair[0]
        )
        selection.used.update(_heaviest(ranked))
        nearest = ranked[:MAX_OBSERVATIONS_PER_SECTION]
        total = sum(share for share, _ in nearest)
        selection.weights.append({observed: share / total for share, observed in nearest})
        selection.sources.update(selection.weights[-1])
    return selection


def are_shareable(distances: Sequence[float], max_entropy: float) -> bool:
    """True if some observed prompts are so much nearer than others that KV can be predicted.

    That is, whether the entropy of the similarity weights is low enough. There is one distance per
    distinct text, because observations with the same text do not discriminate. A single text is
    shareable only if it equals the prompt's.
    """
    if max_entropy in (0.0, 1.0):
        return max_entropy == 1.0  # exact comparison, independent of rounding in the entropy
    if len(distances) == 1:
        return distances[0] == 0.0
    return entropy(similarity_weights(distances)) <= max_entropy * math.log2(len(distances))


def similarity_weights(distances: Sequence[float]) -> list[float]:
    """Similarity weights of observed prompts: softmax of their negated distances."""
    least = min(distances)
    shares = [math.exp(least - distance) for distance in distances]
    return [share / sum(shares) for share in shares]


def entropy(weights: Sequence[float]) -> float:
    """Shannon entropy of a distribution, in bits."""
    return -sum(weight * math.log2(weight) for weight in weights if weight > 0)


def _distance_by_text(candidates: SectionCandidates, distances: Sequence[float]) -> list[float]:
    texts = [
        each.template.sections[candidates.compared_section].text_digest
        for each in candidates.observations
    ]
    return list(dict(zip(texts, distances, strict=True)).values())


def _heaviest(ranked: Sequence[tuple[float, Observation]]) -> Iterator[Observation]:
    total = 0.0
    for share, observed in ranked:
        if total >= USED_WEIGHT_SHARE:
            return
        total += share
        yield observed


def _exact_tokens(template: PromptTemplate, found: Sequence[SectionCandidates]) -> int:
    """Length in tokens of the prompt prefix whose loaded KV is exact, not predicted.

    The first section is always exact, because nothing precedes it. The following sections are exact
    as long as an observation has the same texts.
    """
    exact = 0
    for index, candidates in enumerate(found):
        if index and candidates.exact_match is None:
            break
        exact = template.sections[index].end
    return exact


def _has_section(observed: Observation, index: int, num_tokens: int) -> bool:
    sections = observed.template.sections
    return index < len(sections) and sections[index].num_tokens >= num_tokens


def _has_same_text(observed: Observation, index: int, text_digest: bytes) -> bool:
    sections = observed.template.sections
    return index < len(sections) and sections[index].text_digest == text_digest


class DistanceCache:
    """Cache of the distances between the KV of prompt spans, computed in a background thread.

    Each pair is compared once, because an export name always denotes the same KV. Runs on one event
    loop.
    """

    def __init__(self, index: SpanIndex) -> None:
        self._index = index
        self._distances: OrderedDict[tuple[str | None, str | None], float] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="text-distances")

    async def get_distances(self, pairs: Iterable[Pair]) -> dict[Pair, float]:
        """Look up or compute the KV distances of pairs of prompt spans.

        Cancellation stops the computation after the current pair.
        """
        distances: dict[Pair, float] = {}
        unknown = []
        for pair in dict.fromkeys(pairs):
            if _cache_key(pair) in self._distances:
                distances[pair] = self._distances[_cache_key(pair)]
            else:
                unknown.append(pair)
        if unknown:
            distances |= zip(unknown, await self._compute(unknown), strict=True)
        self._remember({pair: distances[pair] for pair in unknown})
        return distances

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _compute(self, pairs: Sequence[Pair]) -> list[float]:
        view, kv_format = self._index.store.arena.view, self._index.kv_format
        is_cancelled = threading.Event()

        def compare() -> list[float]:
            return [distance(view, kv_format, *pair) for pair in pairs if not is_cancelled.is_set()]

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, compare)
        finally:
            is_cancelled.set()

    def _remember(self, found: Mapping[Pair, float]) -> None:
        for pair, far in found.items():
            self._distances[_cache_key(pair)] = far
        while len(self._distances) > MAX_CACHED_PAIRS:
            self._distances.popitem(last=False)


def distance(view: memoryview, kv_format: KvFormat, text: ExportSlot, other: ExportSlot) -> float:
    """Euclidean distance between the value tensors of two texts that were each prefilled alone.

    Compares all layers, heads and channels, over the tokens of `text`. The tensors are read from
    the arena, where both must be pinned. One layer at a time is held in float32.
    """
    total = 0.0
    for layer in range(kv_format.num_layers):
        ours = _values(view, kv_format, text, layer)
        theirs = _values(view, kv_format, other, layer)[:, : text.num_tokens]
        difference = ours[:, : theirs.shape[1]] - theirs
        total += float(np.square(difference, dtype=np.float64).sum())
    return math.sqrt(total)


def _values(view: memoryview, kv_format: KvFormat, slot: ExportSlot, layer: int) -> Floats:
    """Value tensor of one layer of cached KV in float32, [num_kv_heads, num_tokens, head_dim]."""
    dtype = np.dtype(
        "<u2" if kv_format.dtype == "bfloat16" else f"<f{FLOAT_BYTES[CODES[kv_format.dtype]]}"
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

"""Expected frequency of each shape: a mixture of a uniform and a recorded distribution.

The uniform part gives equal probability to every number of running samples, and to every draft
length that may be chosen there. With a trace its share is small, and covers shapes that were not
recorded.
"""

from collections import defaultdict
from collections.abc import Mapping

from engine.cudagraphs.baselines import CaptureLimits
from engine.cudagraphs.shape import GraphShape, decode, mixed
from engine.cudagraphs.shape_trace import Trace

UNIFORM_SHARE = 0.05
MIXED_SHARE = 0.05

ShapeWeights = Mapping[GraphShape, float]


def shape_weights(limits: CaptureLimits, *, mixed_tokens: int, trace: Trace | None) -> ShapeWeights:
    """Weights, with a sum of one, of the shapes that a graph may be captured for."""
    expected = _uniform_weights(limits, mixed_tokens)
    recorded = {
        shape: steps
        for shape, steps in (trace.counts() if trace else {}).items()
        if _is_plannable(shape, limits, mixed_tokens)
    }
    if not recorded:
        return expected
    total_steps = sum(recorded.values())
    mixture = defaultdict(float, {shape: UNIFORM_SHARE * w for shape, w in expected.items()})
    for shape, steps in recorded.items():
        mixture[shape] += (1 - UNIFORM_SHARE) * steps / total_steps
    return dict(mixture)


def _uniform_weights(limits: CaptureLimits, mixed_tokens: int) -> dict[GraphShape, float]:
    weights = {mixed(n + 1): MIXED_SHARE / mixed_tokens for n in range(mixed_tokens)}
    share = (1 - sum(weights.values())) / limits.max_sequences
    for samples in range(1, limits.max_sequences + 1):
        lengths = limits.lengths.at(samples)
        for drafts in lengths:
            shape = decode(samples, drafts + 1)
            if shape.tokens <= limits.max_batched_tokens:
                weights[shape] = share / len(lengths)
    return weights


def _is_plannable(shape: GraphShape, limits: CaptureLimits, mixed_tokens: int) -> bool:
    if shape.query_len is None:
        return shape.tokens <= mixed_tokens
    return (
        0 < shape.query_len <= limits.max_query_len
        and shape.tokens <= limits.max_batched_tokens
        and shape.samples <= limits.max_sequences
        and shape.query_len - 1 in limits.lengths.at(shape.samples)
    )

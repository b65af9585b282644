"""Planner of CUDA graph shapes: the fewest graphs within a byte budget and a padding limit.

It starts from a fine grid of sizes per draft length, each up to the maximum number of samples that
may use the length. It then removes graphs one at a time, always the one whose steps lose the least
by being padded to the next size, until the rest fits the budget. It continues while the expected
step time stays within MAX_MEAN_SLOWDOWN of vLLM's own sizes and no decode step loses more than
MAX_STEP_SLOWDOWN. The largest graph of each length is never removed, so every allowed batch has a
graph.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from engine.cudagraphs.allowed_shapes import CaptureLimits, vllm_shapes
from engine.cudagraphs.plan_score import GraphMemory, PerLengthLookup, step_cost
from engine.cudagraphs.shapes import GraphShape, Trace, decode, mixed

UNIFORM_SHARE = 0.05
MIXED_SHARE = 0.05
MIXED_TOKENS = 512
"""Tokens of the largest graph for steps that also prefill. The kernels of a larger step run so long
that a graph saves little, and all graphs share a pool of the size that the largest one needs."""
ShapeWeights = Mapping[GraphShape, float]


def shape_weights(limits: CaptureLimits, *, mixed_tokens: int, trace: Trace | None) -> ShapeWeights:
    """Expected frequencies, with a sum of one, of the step shapes that may get a CUDA graph.

    A mixture of a uniform and a recorded distribution. The uniform part gives equal probability to
    every number of running samples, and to every draft length that may be chosen there. With a
    trace the uniform part has a small share, and covers shapes that were not recorded.
    """
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


MAX_MEAN_SLOWDOWN, MAX_STEP_SLOWDOWN = 0.005, 0.05


class BudgetTooSmall(ValueError):
    """The memory budget is too small for one CUDA graph per draft length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """CUDA graph plan: the shapes to capture, in order of capture.

    Mixed shapes come first, then decode shapes, each from largest to smallest.
    """

    shapes: tuple[GraphShape, ...]
    estimated_bytes: int
    budget_bytes: int | None

    @property
    def capture_sizes(self) -> list[int]:
        """Capture sizes for vLLM; with all draft lengths they include every planned shape."""
        return sorted({shape.tokens for shape in self.shapes})

    @property
    def max_samples(self) -> dict[int, int]:
        """Maximum number of samples for which there is a CUDA graph, by draft length."""
        found: dict[int, int] = {}
        for shape in self.shapes:
            if shape.query_len:
                found[shape.query_len - 1] = max(shape.samples, found.get(shape.query_len - 1, 0))
        return found

    def to_json(self) -> str:
        shapes = [(shape.tokens, shape.query_len) for shape in self.shapes]
        return json.dumps([shapes, self.estimated_bytes, self.budget_bytes])

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        shapes, estimated, budget = json.loads(text)
        return cls(
            shapes=tuple(GraphShape(tokens, query_len) for tokens, query_len in shapes),
            estimated_bytes=estimated,
            budget_bytes=budget,
        )


def plan(
    limits: CaptureLimits,
    memory: GraphMemory,
    *,
    budget_bytes: int | None,
    mixed_tokens: int = MIXED_TOKENS,
    trace: Trace | None = None,
) -> Plan:
    mixed_tokens = min(mixed_tokens, limits.max_batched_tokens)
    expected = shape_weights(limits, mixed_tokens=mixed_tokens, trace=trace)
    candidates = _CandidateGraphs(_grid(limits, mixed_tokens), expected)
    most = (
        candidates.num_graphs
        if budget_bytes is None
        else _max_num_graphs(candidates, memory, budget_bytes)
    )
    max_mean_cost = _max_mean_cost(vllm_shapes(limits), expected)
    while candidates.num_graphs > most:
        candidates.remove(min(candidates.removals(), key=_cost))
    while acceptable := [
        r for r in candidates.removals() if r.query_len is None or r.worst <= MAX_STEP_SLOWDOWN
    ]:
        cheapest = min(acceptable, key=_cost)
        if candidates.seconds + cheapest.cost > max_mean_cost:
            break
        candidates.remove(cheapest)
    shapes = tuple(sorted(candidates.shapes(), key=lambda s: (s.query_len is not None, -s.tokens)))
    return Plan(
        shapes=shapes, estimated_bytes=memory.total_bytes(shapes), budget_bytes=budget_bytes
    )


def _max_num_graphs(candidates: "_CandidateGraphs", memory: GraphMemory, budget_bytes: int) -> int:
    pool = memory.pool_bytes(list(candidates.shapes()))
    max_num_graphs = (budget_bytes - pool) // memory.graph_bytes
    if max_num_graphs < candidates.num_lengths:
        least = pool + candidates.num_lengths * memory.graph_bytes
        raise BudgetTooSmall(f"at least {least} bytes are needed, for one graph per draft length")
    return max_num_graphs


def _max_mean_cost(shapes: frozenset[GraphShape], expected: ShapeWeights) -> float:
    """Highest mean cost per step that a plan of CUDA graphs may have, in units of `step_cost`.

    It is the cost with vLLM's shapes, whose padding is averaged over the steps that they serve,
    times (1 + MAX_MEAN_SLOWDOWN).
    """
    ladder = PerLengthLookup(shapes)
    served = {s: found for s in expected if (found := ladder.find(s))}
    exact = sum(expected[s] * step_cost(s.tokens) for s in served)
    padded = sum(expected[s] * step_cost(found.tokens) for s, found in served.items())
    every = sum(weight * step_cost(s.tokens) for s, weight in expected.items())
    return (1 + MAX_MEAN_SLOWDOWN) * every * padded / exact


def _grid(limits: CaptureLimits, mixed_tokens: int) -> Iterator[GraphShape]:
    for query_len in limits.lengths.query_lens:
        top = max(limits.lengths.samples(query_len, limits.max_samples(query_len)), default=0)
        yield from (decode(samples, query_len) for samples in _steps(top))
    yield from map(mixed, _steps(mixed_tokens))


def _steps(top: int) -> list[int]:
    steps = (*range(1, 8), *range(8, 64, 4), *range(64, top, 8))
    return [step for step in steps if step < top] + [top] * (top > 0)


@dataclass(frozen=True, slots=True)
class _Removal:
    """Possible removal of one graph from a plan, and how much it would slow steps down.

    `cost` is the resulting increase of the mean step cost; `worst` is the relative slowdown of the
    smallest step that the graph served.
    """

    query_len: int | None
    index: int
    cost: float
    worst: float


def _cost(removal: _Removal) -> float:
    return removal.cost


class _CandidateGraphs:
    """Candidate graphs by query length: size in tokens, and weight of the steps padded to it."""

    def __init__(self, shapes: Iterator[GraphShape], expected: ShapeWeights) -> None:
        self._tokens: dict[int | None, list[int]] = {}
        for shape in shapes:
            self._tokens.setdefault(shape.query_len, []).append(shape.tokens)
        self._weights = {
            query_len: [0.0] * len(tokens) for query_len, tokens in self._tokens.items()
        }
        ladder = PerLengthLookup(self.shapes())
        self.seconds = 0.0
        for shape, weight in expected.items():
            found = ladder.find(shape)
            assert found is not None, f"nothing has room for {shape}"
            self._weights[shape.query_len][self._tokens[shape.query_len].index(found.tokens)] += (
                weight
            )
            self.seconds += weight * step_cost(found.tokens)

    @property
    def num_graphs(self) -> int:
        return sum(map(len, self._tokens.values()))

    @property
    def num_lengths(self) -> int:
        return len(self._tokens)

    def shapes(self) -> Iterator[GraphShape]:
        return (
            GraphShape(t, query_len) for query_len, tokens in self._tokens.items() for t in tokens
        )

    def removals(self) -> Iterator[_Removal]:
        for query_len, tokens in self._tokens.items():
            least = query_len or 1
            for index in range(len(tokens) - 1):
                low = least if index == 0 else tokens[index - 1] + least
                yield _Removal(
                    query_len=query_len,
                    index=index,
                    cost=self._weights[query_len][index] * (tokens[index + 1] - tokens[index]),
                    worst=step_cost(tokens[index + 1]) / step_cost(low) - 1,
                )

    def remove(self, removal: _Removal) -> None:
        weights = self._weights[removal.query_len]
        del self._tokens[removal.query_len][removal.index]
        weights[removal.index + 1] += weights[removal.index]
        del weights[removal.index]
        self.seconds += removal.cost

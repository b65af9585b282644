"""Which graphs are captured: the fewest that a byte budget and a bound on padding allow.

It begins with a fine grid of sizes for every draft length, each up to the most samples that may
choose the length, and takes away, one after the other, the graph whose steps lose the least by
being padded to the next. It goes on until the rest fits the budget, and from there for as long as
steps are expected to stay within SLOWER of vLLM's own sizes, and no decode step to lose more than
MOST. The largest of each length is never taken away, so whatever may be chosen finds a graph.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from engine.cudagraphs.baselines import Limits, product
from engine.cudagraphs.dispatch import Ladder
from engine.cudagraphs.evaluate import step_cost
from engine.cudagraphs.frequency import Demand, demand
from engine.cudagraphs.memory_model import GraphMemory
from engine.cudagraphs.shape import Shape, decode, mixed
from engine.cudagraphs.shape_trace import Trace

SLOWER, MOST = 0.005, 0.05


class BudgetTooSmall(ValueError):
    """Not even one graph for each length fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`shapes` in the order of their capture: mixed ones first, then the others, largest first."""

    shapes: tuple[Shape, ...]
    estimated_bytes: int
    budget_bytes: int | None

    @property
    def capture_sizes(self) -> list[int]:
        """For vLLM, whose product of these sizes with the lengths has every planned shape."""
        return sorted({shape.tokens for shape in self.shapes})

    @property
    def most_samples(self) -> dict[int, int]:
        """By draft length: as many can decode with drafts of it, and find a graph."""
        found: dict[int, int] = {}
        for shape in self.shapes:
            if shape.query:
                found[shape.query - 1] = max(shape.samples, found.get(shape.query - 1, 0))
        return found

    def dumped(self) -> str:
        shapes = [(shape.tokens, shape.query) for shape in self.shapes]
        return json.dumps([shapes, self.estimated_bytes, self.budget_bytes])

    @classmethod
    def loaded(cls, text: str) -> "Plan":
        shapes, estimated, budget = json.loads(text)
        return cls(
            shapes=tuple(Shape(tokens, query) for tokens, query in shapes),
            estimated_bytes=estimated,
            budget_bytes=budget,
        )


def plan(
    limits: Limits,
    memory: GraphMemory,
    *,
    budget_bytes: int | None,
    mixed_tokens: int,
    trace: Trace | None = None,
) -> Plan:
    mixed_tokens = min(mixed_tokens, limits.max_batched_tokens)
    expected = demand(limits, mixed_tokens=mixed_tokens, trace=trace)
    rungs = _Rungs(_grid(limits, mixed_tokens), expected)
    most = rungs.num_graphs if budget_bytes is None else _fitting(rungs, memory, budget_bytes)
    bound = _bound(product(limits), expected)
    while rungs.num_graphs > most:
        rungs.remove(min(rungs.removals(), key=_cost))
    while gentle := [r for r in rungs.removals() if r.query is None or r.worst <= MOST]:
        cheapest = min(gentle, key=_cost)
        if rungs.seconds + cheapest.cost > bound:
            break
        rungs.remove(cheapest)
    shapes = tuple(sorted(rungs.shapes(), key=lambda s: (s.query is not None, -s.tokens)))
    return Plan(
        shapes=shapes, estimated_bytes=memory.total_bytes(shapes), budget_bytes=budget_bytes
    )


def _fitting(rungs: "_Rungs", memory: GraphMemory, budget_bytes: int) -> int:
    pool = memory.pool_bytes(list(rungs.shapes()))
    fitting = (budget_bytes - pool) // memory.graph_bytes
    if fitting < rungs.num_ladders:
        least = pool + rungs.num_ladders * memory.graph_bytes
        raise BudgetTooSmall(f"one graph for each length takes {least} bytes already")
    return fitting


def _bound(shapes: frozenset[Shape], expected: Demand) -> float:
    """What a step may take on average, on the scale of the model of time: padded as by vLLM's
    shapes, on average over those that they serve, and SLOWER."""
    ladder = Ladder(shapes)
    served = {s: found for s in expected if (found := ladder.find(s))}
    exact = sum(expected[s] * step_cost(s.tokens) for s in served)
    padded = sum(expected[s] * step_cost(found.tokens) for s, found in served.items())
    every = sum(weight * step_cost(s.tokens) for s, weight in expected.items())
    return (1 + SLOWER) * every * padded / exact


def _grid(limits: Limits, mixed_tokens: int) -> Iterator[Shape]:
    for query in limits.lengths.queries:
        top = max(limits.lengths.samples(query, limits.most_samples(query)), default=0)
        yield from (decode(samples, query) for samples in _steps(top))
    yield from map(mixed, _steps(mixed_tokens))


def _steps(top: int) -> list[int]:
    steps = (*range(1, 8), *range(8, 64, 4), *range(64, top, 8))
    return [step for step in steps if step < top] + [top] * (top > 0)


@dataclass(frozen=True, slots=True)
class _Removal:
    """`cost`: what steps lose by it on average. `worst`: what the smallest of its own loses."""

    query: int | None
    place: int
    cost: float
    worst: float


def _cost(removal: _Removal) -> float:
    return removal.cost


class _Rungs:
    """For each length its captured sizes in tokens, and the weight of the steps padded to each."""

    def __init__(self, shapes: Iterator[Shape], expected: Demand) -> None:
        self._tokens: dict[int | None, list[int]] = {}
        for shape in shapes:
            self._tokens.setdefault(shape.query, []).append(shape.tokens)
        self._weights = {query: [0.0] * len(tokens) for query, tokens in self._tokens.items()}
        ladder = Ladder(self.shapes())
        self.seconds = 0.0
        for shape, weight in expected.items():
            found = ladder.find(shape)
            assert found is not None, f"nothing has room for {shape}"
            self._weights[shape.query][self._tokens[shape.query].index(found.tokens)] += weight
            self.seconds += weight * step_cost(found.tokens)

    @property
    def num_graphs(self) -> int:
        return sum(map(len, self._tokens.values()))

    @property
    def num_ladders(self) -> int:
        return len(self._tokens)

    def shapes(self) -> Iterator[Shape]:
        return (Shape(t, query) for query, tokens in self._tokens.items() for t in tokens)

    def removals(self) -> Iterator[_Removal]:
        for query, tokens in self._tokens.items():
            least = query or 1
            for place in range(len(tokens) - 1):
                low = least if place == 0 else tokens[place - 1] + least
                yield _Removal(
                    query=query,
                    place=place,
                    cost=self._weights[query][place] * (tokens[place + 1] - tokens[place]),
                    worst=step_cost(tokens[place + 1]) / step_cost(low) - 1,
                )

    def remove(self, removal: _Removal) -> None:
        weights = self._weights[removal.query]
        del self._tokens[removal.query][removal.place]
        weights[removal.place + 1] += weights[removal.place]
        del weights[removal.place]
        self.seconds += removal.cost

"""Crossover between stock and shared-prefix attention: a step cost model of this machine.

The time of each is modeled as a sum of non-negative costs (per call, per query token, per shared
node, per token of KV cache packed, per token of KV cache read for a query), fitted to the times of
a dozen small steps at startup.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kernels.shared_prefix_attention.plan import Int32s, SharingPlan

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """The work of one step. A pair is a query token and a KV cache token that it reads."""

    num_queries: int
    num_nodes: int
    node_tokens: int
    prefix_pairs: int
    suffix_pairs: int

    @classmethod
    def of(cls, plan: SharingPlan, seq_lens: Int32s, num_queries: int) -> Self:
        """Work of a step under `plan`.

        Rows are assumed to have equally many query tokens, as in decode.
        """
        queries = num_queries / len(seq_lens)
        prefix, node_tokens = _prefix_and_node_tokens(plan)
        return cls(
            num_queries=num_queries,
            num_nodes=len(plan.node_tokens),
            node_tokens=node_tokens,
            prefix_pairs=round(queries * prefix),
            suffix_pairs=round(queries * (int(seq_lens.sum()) - prefix)),
        )

    def stock_terms(self) -> list[float]:
        return [1.0, self.num_queries, self.prefix_pairs + self.suffix_pairs]

    def shared_terms(self) -> list[float]:
        terms = (self.num_queries, self.num_nodes, self.node_tokens)
        return [1.0, *terms, self.prefix_pairs, self.suffix_pairs]


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossoverTrial:
    """One timed step, in seconds per layer; `steady`: its repetitions took similar times."""

    work: StepWork
    stock_seconds: float
    shared_seconds: float
    steady: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossover:
    """Fitted costs in seconds per unit of each term, in the order of the terms."""

    stock: tuple[float, ...]
    shared: tuple[float, ...]

    @classmethod
    def fit(cls, trials: Sequence[CrossoverTrial]) -> Self:
        return cls(
            stock=_fit_costs([(t.work.stock_terms(), t.stock_seconds) for t in trials]),
            shared=_fit_costs([(t.work.shared_terms(), t.shared_seconds) for t in trials]),
        )

    def is_faster(self, work: StepWork) -> bool:
        return _dot(self.shared, work.shared_terms()) < _dot(self.stock, work.stock_terms())


@lru_cache(maxsize=4)
def _prefix_and_node_tokens(plan: SharingPlan) -> tuple[int, int]:
    """Prefix tokens of all rows, and tokens of the nodes.

    Cached because a plan serves many steps.
    """
    return int(plan.suffix_starts.sum()), int(plan.node_tokens.sum())


def _dot(costs: Sequence[float], terms: Sequence[float]) -> float:
    return sum(cost * term for cost, term in zip(costs, terms, strict=True))


def _fit_costs(samples: Sequence[tuple[list[float], float]]) -> tuple[float, ...]:
    """Least squares of relative errors; negative costs are removed, the most negative first."""
    terms = np.array([terms for terms, _ in samples])
    seconds = np.array([seconds for _, seconds in samples])
    relative: Floats = terms / seconds[:, None]
    costs = np.zeros(terms.shape[1])
    kept = np.arange(terms.shape[1])
    while len(kept):
        found = np.linalg.lstsq(relative[:, kept], np.ones(len(seconds)), rcond=None)[0]
        if (found >= 0).all():
            costs[kept] = found
            break
        kept = np.delete(kept, found.argmin())
    return tuple(costs.tolist())

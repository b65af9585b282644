"""Choice of chains whose KV is measured, and the divergence from their distributions."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.errors import RequestRefused
from engine.kv_versions.probes import (
    MAX_CONTEXTS,
    PROBE_TOKENS,
    ChainContexts,
    measure,
)
from engine.types import (
    Completion,
    KeptKv,
    SampleRequest,
    Sampling,
    TopLogprobRows,
    VersionSpan,
)

LENGTH = 10
COST = LENGTH + PROBE_TOKENS


def finished(
    contexts: ChainContexts, chain: str, *, lag: int = 0, length: int = LENGTH, **kept: Any
) -> None:
    """End a request of a chain, whose oldest KV has the age `lag`."""
    request = SampleRequest(
        id=chain,
        prompt_token_ids=[1] * length,
        sampling=Sampling(max_tokens=1),
        kept_kv=KeptKv(chain=chain, **({"max_kl": 0.1} | kept)),
    )
    contexts.on_finished(request, completion([-0.5], lag=lag))


def completion(logprobs: Sequence[float], *, lag: int) -> Completion:
    """One token for each logprob, which the first of two tokens has at its position."""
    num = len(logprobs)
    ids = np.tile(np.array([7, 7, 8], np.int32), (num, 1))
    rows = np.array([[value, value, np.log1p(-np.exp(value))] for value in logprobs])
    return Completion(
        token_ids=[7] * num,
        logprobs=list(logprobs),
        finish="length",
        versions=(VersionSpan(version="v1", start=0, end=num),),
        num_cached_tokens=0,
        top_logprobs=TopLogprobRows(ids, rows.astype(np.float32), np.ones(num, np.int64)),
        kv_lag=lag,
    )


def chosen(contexts: ChainContexts) -> list[str]:
    return [context.kept.chain for context in contexts.chosen()]


def test_only_chains_that_limit_the_divergence_are_measured() -> None:
    contexts = ChainContexts(1000)
    finished(contexts, "a")
    finished(contexts, "b", max_kl=None)
    finished(contexts, "c", max_lag=0)
    contexts.on_update()
    assert chosen(contexts) == ["a"]
    contexts.clear()
    assert chosen(contexts) == []


def test_one_chain_of_each_age_is_measured_before_a_second_one_of_any() -> None:
    contexts = ChainContexts(3 * COST)
    for chain in ("old", "older"):
        finished(contexts, chain, lag=1)
    for chain in ("young", "younger"):
        finished(contexts, chain)
    contexts.on_update()
    assert chosen(contexts) == ["younger", "older", "young"]


def test_kv_of_the_served_weights_is_not_measured() -> None:
    contexts = ChainContexts(1000)
    finished(contexts, "a")
    assert chosen(contexts) == []


def test_contexts_beyond_the_budget_are_neither_measured_nor_retained() -> None:
    contexts = ChainContexts(COST)
    finished(contexts, "long", length=LENGTH + 1)
    finished(contexts, "short")
    contexts.on_update()
    assert chosen(contexts) == ["short"]
    finished(contexts, "short", length=LENGTH + 1)  # its retained context is not its last one
    assert chosen(contexts) == []


def test_retained_contexts_are_bounded() -> None:
    contexts = ChainContexts(10**6)
    for number in range(MAX_CONTEXTS + 5):
        finished(contexts, str(number))
    assert len(contexts._contexts) == MAX_CONTEXTS and "4" not in contexts._contexts
    few = ChainContexts(COST)
    for number in range(100):
        finished(few, str(number))
    assert few._num_tokens <= 8 * COST


@dataclass
class FakeProbes:
    """Engine whose chains sample tokens with these logprobs; exact ones are all `exact`."""

    kept: dict[str, Completion]
    exact: float
    requests: list[SampleRequest] = field(default_factory=list)

    async def sample(self, request: SampleRequest) -> Completion:
        self.requests.append(request)
        assert request.kept_kv is not None
        if request.kept_kv.chain not in self.kept:
            raise RequestRefused("refused")
        return self.kept[request.kept_kv.chain]

    async def score(
        self, token_ids: Sequence[int], given: NDArray[np.int32], priority: int
    ) -> TopLogprobRows:
        num = len(token_ids) - LENGTH
        assert given[LENGTH:].tolist() == [[7, 8]] * num
        values = [self.exact, self.exact, np.log1p(-np.exp(self.exact))]
        rows = np.tile(np.array(values, np.float32), (len(token_ids), 1))
        return TopLogprobRows(np.zeros(rows.shape, np.int32), rows, np.zeros(len(rows), int))


def test_divergences_are_means_over_the_tokens_of_each_age() -> None:
    contexts = ChainContexts(1000)
    for chain, lag in (("a", 0), ("b", 0), ("changed", 0), ("exact", 1), ("refused", 1)):
        finished(contexts, chain, lag=lag)
    contexts.on_update()
    changed = completion([np.log(0.5)] * 2, lag=1)
    changed_versions = (VersionSpan(version="v1", start=0, end=1), changed.versions[0])
    probes = FakeProbes(
        {
            "a": completion([np.log(0.5)] * 2, lag=1),
            "b": completion([np.log(0.25)], lag=1),
            "exact": completion([np.log(0.5)], lag=0),
            "changed": replace(changed, versions=changed_versions),
        },
        exact=float(np.log(0.5)),
    )
    [found] = asyncio.run(measure(probes, contexts.chosen(), 2, 99))
    expected = 0.25 * np.log(0.5) + 0.75 * np.log(1.5)
    assert (found.lag, found.num_chains, found.num_tokens) == (1, 2, 3)
    assert found.kl == pytest.approx(expected / 3, abs=1e-4)
    assert {request.priority for request in probes.requests} == {99}
    assert all(r.kept_kv is not None and r.kept_kv.max_kl is None for r in probes.requests)

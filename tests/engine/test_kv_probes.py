"""Choice of chains whose KV is measured, and the divergence from their distributions."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.errors import RequestRefused
from engine.kv_versions.contexts import (
    MAX_CONTEXTS,
    PROBE_TOKENS,
    ChainContexts,
    ProbeChoice,
)
from engine.kv_versions.probes import mean_divergences, measure, owner_divergences
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
    contexts: ChainContexts,
    chain: str,
    *,
    lag: int = 0,
    length: int = LENGTH,
    session_id: str | None = None,
    rank: int | None = None,
    adapter: str | None = None,
    **kept: Any,
) -> None:
    """End a request of a chain, whose oldest KV has the age `lag`."""
    request = SampleRequest(
        id=chain,
        prompt_token_ids=[1] * length,
        sampling=Sampling(max_tokens=1),
        kept_kv=KeptKv(chain=chain, **({"max_kl": 0.1} | kept)),
        session_id=session_id,
        data_parallel_rank=rank,
        adapter=adapter,
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
    return chains_of(ProbeChoice(contexts))


def chains_of(choice: ProbeChoice) -> list[str]:
    return [context.kept.chain for _, context in iter(choice.take, None)]


def test_only_chains_that_limit_the_divergence_are_measured() -> None:
    contexts = ChainContexts(1000)
    finished(contexts, "a")
    finished(contexts, "b", max_kl=None)
    finished(contexts, "c", max_lag=0)
    finished(contexts, "d", adapter="adapter")
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
    contexts.on_update()
    retained = {context.kept.chain for _, context in contexts.with_older_kv()}
    assert len(retained) == MAX_CONTEXTS and "4" not in retained
    few = ChainContexts(COST)
    for number in range(100):
        finished(few, str(number))
    assert len(few) * LENGTH <= 8 * COST


@pytest.mark.parametrize(("budget", "length"), [(10**6, LENGTH), (COST, COST - PROBE_TOKENS)])
def test_contexts_of_one_owner_do_not_displace_those_of_another(budget: int, length: int) -> None:
    contexts = ChainContexts(budget)
    finished(contexts, "first", owner="a")
    for number in range(MAX_CONTEXTS + 5):
        finished(contexts, str(number), owner="b", length=length)
    contexts.on_update()
    assert "first" in {context.kept.chain for _, context in contexts.with_older_kv()}


def test_every_owner_has_a_chain_before_any_has_a_second_one_of_an_age() -> None:
    contexts = ChainContexts(3 * COST)
    finished(contexts, "a", owner="a")
    for chain in ("b1", "b2", "b3"):
        finished(contexts, chain, owner="b")
    contexts.on_update()
    assert chosen(contexts) == ["b3", "a", "b2"]


def test_owner_with_fewer_measured_tokens_comes_first() -> None:
    contexts = ChainContexts(3 * COST)
    finished(contexts, "a1", owner="a")
    finished(contexts, "a2", owner="a", lag=1)
    finished(contexts, "b3", owner="b", lag=2)
    contexts.on_update()
    assert chosen(contexts) == ["a1", "b3", "a2"]


def test_contexts_of_ended_sessions_are_removed() -> None:
    contexts = ChainContexts(1000)
    for chain in ("a", "b", "c"):
        finished(contexts, chain, session_id=f"session {chain}")
    contexts.release(["session a", "session b", "unknown"])
    contexts.on_update()
    assert chosen(contexts) == ["c"]


def test_chain_without_older_kv_is_replaced_by_another_one() -> None:
    contexts = ChainContexts(2 * COST)
    for chain in ("a", "b", "c", "d"):
        finished(contexts, chain)
    contexts.on_update()
    choice = ProbeChoice(contexts)
    lag, last = choice.take() or pytest.fail("nothing was chosen")
    assert last.kept.chain == "d"
    choice.on_failed(lag, last, num_computed_tokens=0)
    assert chains_of(choice) == ["c", "b"]


def test_tokens_of_a_failed_probe_count_as_far_as_they_were_computed() -> None:
    contexts = ChainContexts(2 * COST)
    for chain in ("a", "b", "c"):
        finished(contexts, chain)
    contexts.on_update()
    choice = ProbeChoice(contexts)
    lag, last = choice.take() or pytest.fail("nothing was chosen")
    choice.on_failed(lag, last, num_computed_tokens=COST)
    assert chains_of(choice) == ["b"]


def test_discarded_context_is_removed_unless_a_later_request_replaced_it() -> None:
    contexts = ChainContexts(1000)
    finished(contexts, "a")
    contexts.on_update()
    [(_, context)] = contexts.with_older_kv()
    finished(contexts, "a", lag=1)
    contexts.discard(context)
    [(_, later)] = contexts.with_older_kv()
    contexts.discard(later)
    assert len(contexts) == 0


def test_contexts_that_end_during_a_measurement_are_measured_later() -> None:
    contexts = ChainContexts(2 * COST)
    contexts.on_update()
    choice = ProbeChoice(contexts)
    assert chains_of(choice) == []
    for chain in ("a", "b", "c"):
        finished(contexts, chain, lag=1)
    assert chains_of(choice) == ["c", "b"]
    finished(contexts, "d", lag=2)
    assert chains_of(choice) == [], "the budget of the update is spent"


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
    results = asyncio.run(measure(probes, ProbeChoice(contexts), 2, 99))
    [found] = mean_divergences(results)
    expected = 0.25 * np.log(0.5) + 0.75 * np.log(1.5)
    assert (found.lag, found.num_chains, found.num_tokens) == (1, 2, 3)
    assert found.kl == pytest.approx(expected / 3, abs=1e-4)
    assert {request.priority for request in probes.requests} == {99}
    assert all(r.kept_kv is not None and r.kept_kv.max_kl is None for r in probes.requests)


def test_probe_runs_on_the_engine_of_the_last_request_and_is_no_request_of_its_session() -> None:
    contexts = ChainContexts(1000)
    for rank in (0, 1):
        finished(contexts, "a", session_id="s", rank=rank)
    contexts.on_update()
    probes = FakeProbes({"a": completion([-0.5], lag=1)}, exact=-0.5)
    asyncio.run(measure(probes, ProbeChoice(contexts), 2, 0))
    [request] = probes.requests
    assert (request.data_parallel_rank, request.session_id) == (1, None)


def test_divergences_of_owners_are_means_over_their_own_chains() -> None:
    contexts = ChainContexts(1000)
    for chain, owner in (("a", "x"), ("b", "y")):
        finished(contexts, chain, owner=owner)
    contexts.on_update()
    half, quarter = np.log(0.5), np.log(0.25)
    kept = {"a": completion([half] * 2, lag=1), "b": completion([quarter], lag=1)}
    probes = FakeProbes(kept, exact=float(half))
    results = asyncio.run(measure(probes, ProbeChoice(contexts), 2, 0))
    expected = 0.25 * np.log(0.5) + 0.75 * np.log(1.5)
    owners, lags, means = zip(*owner_divergences(results), strict=True)
    assert (owners, lags) == (("x", "y"), (1, 1))
    assert means == pytest.approx((0, expected), abs=1e-4)


def test_measurement_continues_until_chains_with_older_kv_are_found() -> None:
    contexts = ChainContexts(10 * COST)
    for number in range(9):
        finished(contexts, str(number))
    contexts.on_update()
    overtaken = replace(completion([-0.5], lag=0), num_cached_tokens=LENGTH)
    kept = {str(number): overtaken for number in range(1, 9)} | {"0": completion([-0.5], lag=1)}
    probes = FakeProbes(kept, exact=-0.5)
    [found] = mean_divergences(asyncio.run(measure(probes, ProbeChoice(contexts), 2, 0)))
    assert (found.lag, found.num_chains) == (1, 1)
    assert len(contexts) == 1

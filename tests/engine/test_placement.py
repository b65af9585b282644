"""Choice of the data-parallel engine by shared KV and by running tokens."""

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any, Never

import pytest
from vllm.v1.engine.core_client import DPLBAsyncMPClient

from engine.launch.ranks import placement
from engine.launch.ranks.placement import (
    Placement,
    PlacementKeys,
    RequestsInFlight,
    count_running_tokens,
    placement_keys,
    running_tokens,
)
from engine.types.samples import KeptKv, SampleRequest, Sampling

BLOCK = 4


def sample(*tokens: int, **options: Any) -> SampleRequest:
    return SampleRequest(
        id="s", prompt_token_ids=tokens, sampling=Sampling(max_tokens=1), **options
    )


def of_group(name: str) -> list[SampleRequest]:
    return [sample(1, group=name)]


def of_chain(*tokens: int, chain: str = "c", **options: Any) -> list[SampleRequest]:
    return [sample(*tokens, kept_kv=KeptKv(chain=chain, max_lag=None), **options)]


class Engines:
    """Two engines with given running tokens."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)
        self._placement = Placement(len(tokens), lambda: self.tokens)

    def rank(self, samples: list[SampleRequest]) -> int | None:
        return self._placement.rank(samples, BLOCK)


def test_one_engine_needs_no_rank() -> None:
    engines = Placement(1, lambda: pytest.fail("the load is not read"))
    assert engines.rank(of_group("a"), BLOCK) is None


def test_new_group_goes_to_the_engine_with_the_fewest_running_tokens() -> None:
    engines = Engines(30, 10, 20)
    assert [engines.rank([]), engines.rank(of_group("a"))] == [1, 1]
    engines.tokens[1] = 40
    assert [engines.rank([]), engines.rank(of_group("b"))] == [2, 2]


def test_known_group_stays_on_its_engine() -> None:
    engines = Engines(0, 1)
    assert engines.rank(of_group("a")) == 0
    engines.tokens[0] = 100
    assert [engines.rank(of_group(name)) for name in ("a", "b", "a")] == [0, 1, 0]


def test_least_recent_group_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "MAX_KEYS", 2)
    engines = Engines(0, 1)
    for name in ("a", "b", "a", "c"):
        engines.rank(of_group(name))
    engines.tokens[0] = 2
    assert [engines.rank(of_group(name)) for name in ("a", "c", "b")] == [0, 0, 1]


def test_given_rank_is_used_and_nothing_is_remembered() -> None:
    engines = Engines(0, 1)
    probed = [1, 2, 3, 4]
    assert engines.rank(of_chain(*probed, group="g", data_parallel_rank=1)) == 1
    assert engines.rank(of_chain(*probed)) == 0
    assert engines.rank(of_group("g")) == 0


def test_session_comes_before_chain_and_group() -> None:
    [call] = of_chain(1, 2, 3, 4, session_id="s", group="g")
    assert placement_keys([call], BLOCK) == PlacementKeys(("s",))
    assert placement_keys([sample(1)], BLOCK) == PlacementKeys()


def test_prefills_go_to_the_engine_of_their_group() -> None:
    samples = [sample(1), *of_group("g"), *of_group("g")]
    assert placement_keys(samples, BLOCK) == PlacementKeys(("g",))


def test_conversation_of_a_chain_returns_to_the_engine_of_its_earlier_prompt() -> None:
    engines = Engines(0, 1)
    first = [1, 2, 3, 4, 5]
    assert engines.rank(of_chain(*first, group="g")) == 0
    engines.tokens[0] = 2
    assert engines.rank(of_chain(*first, *range(20), group="later")) == 0
    assert engines.rank(of_chain(*first, *range(20), *range(9), group="last")) == 0
    assert engines.rank(of_chain(*first, chain="other", group="apart")) == 1


def test_common_beginning_does_not_bind_prompts_of_a_chain_to_one_engine() -> None:
    engines = Engines(0, 1)
    system = [1, 2, 3, 4]
    assert engines.rank(of_chain(*system, 5, 6, 7, 8, group="g")) == 0
    engines.tokens[0] = 2
    assert engines.rank(of_chain(*system, 9, 9, 9, 9, group="h")) == 1


def test_prompt_below_one_block_shares_no_kv() -> None:
    assert placement_keys(of_chain(1, 2, 3, group="g"), BLOCK) == PlacementKeys(("g",))
    assert placement_keys(of_chain(1, 2, 3), BLOCK) == PlacementKeys()


class Llm:
    """vLLM's client of two engines and its output processor, with requests that run nowhere."""

    def __init__(self) -> None:
        self.engine_core: Any = SimpleNamespace(
            reqs_in_flight={}, engine_inflight=Counter(), core_engines=[b"0", b"1"]
        )
        self.output_processor: Any = SimpleNamespace(request_states={})

    def add(self, request_id: str, prompt_len: int, max_tokens: int | None, rank: int) -> None:
        state = SimpleNamespace(prompt_len=prompt_len, max_tokens_param=max_tokens)
        self.output_processor.request_states[request_id] = state
        request: Any = SimpleNamespace(request_id=request_id, data_parallel_rank=rank)
        DPLBAsyncMPClient.get_core_engine_for_request(self.engine_core, request)

    async def finish(self, *request_ids: str) -> None:
        for request_id in request_ids:
            self.output_processor.request_states.pop(request_id, None)
        outputs: Any = SimpleNamespace(finished_requests=set(request_ids))
        await DPLBAsyncMPClient.process_engine_outputs(self.engine_core, outputs)

    def summed_tokens(self) -> list[int]:
        """Running tokens, as the sum over all requests in flight."""
        tokens: Counter[bytes] = Counter()
        for request_id, engine in self.engine_core.reqs_in_flight.items():
            state = self.output_processor.request_states[request_id]
            tokens[engine] += state.prompt_len + (state.max_tokens_param or 0)
        return [tokens[engine] for engine in self.engine_core.core_engines]


def counted() -> Any:
    llm: Any = Llm()
    count_running_tokens(llm)
    return llm


async def test_running_tokens_are_the_sum_over_vllms_requests() -> None:
    llm, rng, unfinished = counted(), random.Random(0), list[str]()
    for step in range(300):
        if unfinished and rng.random() < 0.45:
            await llm.finish(unfinished.pop(rng.randrange(len(unfinished))), f"unknown {step}")
        else:
            llm.add(str(step), rng.randrange(9), rng.choice([None, 5, 70]), rng.randrange(2))
            unfinished.append(str(step))
        assert running_tokens(llm) == llm.summed_tokens()
    await llm.finish(*unfinished)
    assert running_tokens(llm) == [0, 0]


async def test_aborted_request_counts_until_its_engine_has_ended_it() -> None:
    llm = counted()
    llm.add("a", 3, 4, 1)
    llm.output_processor.request_states.clear()
    assert running_tokens(llm) == [0, 7]
    await llm.finish("a")
    assert running_tokens(llm) == [0, 0]


def test_running_tokens_are_read_without_iterating_over_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = counted()
    llm.add("a", 3, 4, 0)

    def fail(*_: Any) -> Never:
        pytest.fail("iterates over the requests in flight")

    monkeypatch.setattr(RequestsInFlight, "items", fail, raising=False)
    monkeypatch.setattr(RequestsInFlight, "__iter__", fail, raising=False)
    assert running_tokens(llm) == [7, 0]

"""Choice of the data-parallel engine by shared KV and by running tokens."""

from typing import Any

import pytest

from engine.io import placement
from engine.io.placement import Placement, PlacementKeys, placement_keys
from engine.types import KeptKv, SampleRequest, Sampling

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

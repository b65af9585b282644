"""Choice of contexts that are computed again, and the requests that compute one."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.errors import RequestRefused
from engine.kv_versions.refresh import MAX_REQUESTS, EndedContexts, KvRefresh, RefreshLimits
from engine.types import Completion, KeptKv, SampleRequest, Sampling

BLOCK = 4
PROMPT = list(range(10))


def request(chain: str, prompt: Sequence[int] = PROMPT, **changes: Any) -> SampleRequest:
    kept = KeptKv(chain=chain, **({"max_lag": 1} | changes.pop("kept", {})))
    return SampleRequest(
        id=changes.pop("id", chain),
        prompt_token_ids=prompt,
        sampling=Sampling(max_tokens=1),
        kept_kv=kept,
        **changes,
    )


def completion(*tokens: int, lag: int = 0, num_cached: int = 0) -> Completion:
    return Completion(
        token_ids=list(tokens),
        logprobs=[-0.5] * len(tokens),
        finish="length",
        versions=(),
        num_cached_tokens=num_cached,
        kv_lag=lag,
    )


def contexts_of(*requests: SampleRequest, lag: int = 0, max_tokens: int = 1000) -> EndedContexts:
    contexts = EndedContexts(max_tokens, 100)
    for each in requests:
        contexts.on_finished(each, completion(77, lag=lag))
    return contexts


def names(contexts: EndedContexts) -> list[str]:
    return [key for key, _ in contexts.items()]


def beyond(contexts: EndedContexts, limit: int | None = 1) -> list[str]:
    return [key for key, _ in contexts.beyond(lambda kept: limit)]


def test_only_chains_with_a_limit_and_without_an_adapter_are_retained() -> None:
    contexts = contexts_of(
        request("a"),
        request("b", kept={"max_lag": None, "max_kl": 0.1}),
        request("c", kept={"max_lag": None}),
        request("d", adapter="adapter"),
    )
    assert names(contexts) == ["b", "a"]
    [_, (_, context)] = contexts.items()
    assert list(context.token_ids) == [*PROMPT, 77]


def test_contexts_beyond_the_limit_are_sorted_by_the_age_of_their_kv() -> None:
    contexts = contexts_of(request("a"))
    contexts.on_finished(request("b"), completion(77, lag=1))
    contexts.on_finished(request("c"), completion(77))
    assert beyond(contexts) == []
    contexts.on_update()
    assert beyond(contexts) == ["b"]
    assert beyond(contexts, 0) == ["b", "c", "a"]
    assert beyond(contexts, None) == []


def test_request_that_continues_a_context_replaces_it() -> None:
    contexts = contexts_of(request("a"), request("a", id="sibling"), request("b"))
    contexts.on_finished(request("a", id="other"), completion(78))
    contexts.on_submitted([request("a", [*PROMPT, 77, 5])] * 2)
    assert names(contexts) == ["other", "b"]
    contexts.on_submitted([request("a", [*PROMPT, 7])])
    assert names(contexts) == ["other", "b"]
    contexts.on_submitted([request("a", [*PROMPT, 78])])
    assert names(contexts) == ["b"]


def test_owner_with_most_tokens_loses_its_contexts_first() -> None:
    contexts = contexts_of(
        request("a", kept={"owner": "a"}),
        *[request(f"b{i}", kept={"owner": "b"}) for i in range(3)],
        max_tokens=4 * 11,
    )
    contexts.on_finished(request("long", [1] * 21, kept={"owner": "b"}), completion(77))
    assert names(contexts) == ["long", "b2", "a"]
    contexts.on_finished(request("longer", [1] * 43, kept={"owner": "b"}), completion(77))
    assert names(contexts) == ["a"], "a context of the whole limit leaves no room for another"


def test_contexts_are_bounded_and_end_with_their_session() -> None:
    contexts = contexts_of(*[request(str(i)) for i in range(9)], max_tokens=3 * 11)
    assert names(contexts) == ["8", "7", "6"]
    contexts.on_finished(request("s", session_id="s", id="s"), completion(77))
    contexts.release(["s"])
    assert names(contexts) == ["8", "7"]


class Requests:
    """Requests of a recomputation, of which the first tokens are cached by those before."""

    def __init__(self, on_sample: Callable[[SampleRequest], None] = lambda _: None) -> None:
        self.found: list[SampleRequest] = []
        self._on_sample = on_sample
        self._num_cached: dict[str, int] = {}

    async def sample(self, request: SampleRequest) -> Completion:
        self.found.append(request)
        self._on_sample(request)
        assert request.kept_kv is not None
        chain, length = request.kept_kv.chain, len(request.prompt_token_ids)
        num_cached = self._num_cached.get(chain, 0)
        self._num_cached[chain] = length // BLOCK * BLOCK
        return completion(7, num_cached=num_cached)

    @property
    def chains(self) -> list[str]:
        """Chains in the order of their first requests."""
        return list(dict.fromkeys(each.kept_kv.chain for each in self.found if each.kept_kv))

    @property
    def lengths(self) -> list[int]:
        return [len(each.prompt_token_ids) for each in self.found]


def refresh_of(
    requests: Requests, *, length: int, per_step: int, longest: int = 10**6
) -> KvRefresh:
    """Recomputation of one context, whose KV is of one update before."""
    limits = RefreshLimits(
        tokens_per_step=per_step,
        max_context_tokens=longest,
        max_retained_tokens=10**6,
        block_size=BLOCK,
    )
    made = KvRefresh(requests, limits)
    last = request("a", [1] * (length - 1), session_id="s", data_parallel_rank=1)
    made.contexts.on_finished(last, completion(2))
    made.on_update(keeps_kv=True)
    return made


def run(made: KvRefresh, limit: int | None = 0) -> bool:
    return asyncio.run(made.run(lambda kept: limit, 99))


def test_context_is_computed_once_from_its_start_with_the_limits_of_its_chain() -> None:
    requests = Requests()
    made = refresh_of(requests, length=21, per_step=8)
    assert run(made)
    assert requests.lengths == [9, 17, 21]
    assert made.num_tokens == 9 + (17 - 8) + (21 - 16)
    for each in requests.found:
        assert each.kept_kv == KeptKv(chain="a", max_lag=1)
        assert (each.priority, each.prefill_tokens_per_step) == (99, 8)
        assert (each.session_id, each.data_parallel_rank) == (None, 1)
    assert not run(made)
    made.on_update(keeps_kv=True)
    assert not run(made), "it is computed again once after each request of the chain"


@pytest.mark.parametrize(("length", "per_step"), [(1000, 1), (1000, 300), (5, 8), (8, 8), (9, 8)])
def test_requests_for_a_context_are_few_and_end_behind_whole_blocks(
    length: int, per_step: int
) -> None:
    requests = Requests()
    assert run(refresh_of(requests, length=length, per_step=per_step))
    *parts, last = requests.lengths
    assert last == length and len(requests.found) <= MAX_REQUESTS
    assert all(part % BLOCK == 1 for part in parts)


def test_context_as_long_as_the_limit_has_room_for_a_token() -> None:
    requests = Requests()
    assert run(refresh_of(requests, length=20, per_step=100, longest=20))
    assert requests.lengths == [19]


def test_kv_within_its_limit_is_not_computed_again() -> None:
    requests = Requests()
    assert not run(refresh_of(requests, length=20, per_step=8), limit=1)
    assert not requests.found


def test_owners_take_turns() -> None:
    requests = Requests()
    made = refresh_of(requests, length=5, per_step=8)
    for number in range(3):
        chain = request(f"b{number}", kept={"owner": "b"})
        made.contexts.on_finished(chain, completion(2, lag=number))
    made.on_update(keeps_kv=True)
    while run(made):
        pass
    assert requests.chains == ["b2", "a", "b1", "b0"]


def test_next_request_of_the_chain_ends_the_recomputation() -> None:
    def continued(_: SampleRequest) -> None:
        made.contexts.on_submitted([request("a", [*[1] * 20, 2, 9])])

    requests = Requests(continued)
    made = refresh_of(requests, length=21, per_step=8)
    assert run(made)
    assert requests.lengths == [9]
    assert not run(made)


def test_end_of_the_session_ends_the_recomputation() -> None:
    requests = Requests(lambda _: made.contexts.release(["s"]))
    made = refresh_of(requests, length=21, per_step=8)
    assert run(made)
    assert requests.lengths == [9] and not len(made.contexts)


def test_update_interrupts_a_recomputation_which_begins_again_after_it() -> None:
    def update(_: SampleRequest) -> None:
        if len(requests.found) == 1:
            made.on_update(keeps_kv=True)

    requests = Requests(update)
    made = refresh_of(requests, length=21, per_step=8)
    assert run(made)
    assert requests.lengths == [9]
    assert run(made)
    assert requests.lengths == [9, 9, 17, 21]


def test_aborted_recomputation_is_repeated() -> None:
    class Aborted(Requests):
        async def sample(self, request: SampleRequest) -> Completion:
            found = await super().sample(request)
            return replace(found, finish="abort") if len(self.found) == 1 else found

    requests = Aborted()
    made = refresh_of(requests, length=9, per_step=8)
    assert run(made) and made.num_tokens == 0
    assert run(made) and not run(made)
    assert requests.lengths == [9, 9]


def test_update_that_resets_the_cache_leaves_nothing_to_compute() -> None:
    requests = Requests()
    made = refresh_of(requests, length=21, per_step=8)
    made.on_update(keeps_kv=False)
    assert not run(made) and not len(made.contexts)


def test_context_that_the_engine_refuses_is_not_retried() -> None:
    def refuse(_: SampleRequest) -> None:
        raise RequestRefused("refused")

    requests = Requests(refuse)
    made = refresh_of(requests, length=21, per_step=8)
    assert run(made)
    assert len(requests.found) == 1 and not run(made)

"""A tree keeps its bounds for any request and any lengths of its paths."""

import asyncio
import random
from collections.abc import Awaitable, Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.wire.branching import Branching
from coppice.wire.rollouts import GroupAnswer
from engine.types.samples import Completion, SampleRequest, Sampling
from service.rollouts.groups.group import Group
from service.rollouts.groups.options import GroupOptions
from service.rollouts.trees.branching_plan import Plan, distribute_leaves, next_cut, split
from service.rollouts.trees.tree_sampler import TreeSampler
from tests.fake_engine import FakeEngine
from tests.sample_sizes import num_examples

BLOCK = 8


class Whimsical(FakeEngine):
    """Ends some samples early, and varies the entropy of tokens."""

    def __init__(self, seed: int) -> None:
        super().__init__(max_context_tokens=10**6)
        self._rng = random.Random(seed)
        self.entropy = lambda place: self._rng.random()

    async def submit(self, samples: Sequence[SampleRequest]) -> list[Awaitable[Completion]]:
        self.instant = False
        completions = await super().submit(samples)
        for sample in list(self.running.values()):
            if self._rng.random() < 0.3:
                sample.limit, sample.ends = self._rng.randint(1, sample.limit), "stop"
        self.step(10**6)
        return completions


def trees() -> st.SearchStrategy[dict[str, Any]]:
    common = {
        "factor": st.one_of(st.integers(1, 4), st.lists(st.integers(1, 4), min_size=1, max_size=3)),
        "max_depth": st.integers(1, 6),
        "max_leaves": st.integers(1, 20),
        "max_new_tokens_total": st.one_of(st.integers(1, 400), st.just(10**6)),
        "min_gap": st.integers(0, 40),
        "on_early_stop": st.sampled_from(["redistribute", "none"]),
    }
    first = {"first_split": st.one_of(st.just(0), st.integers(1, 60))}
    rising = st.lists(st.integers(0, 90), min_size=1, max_size=5, unique=True).map(sorted)
    entropy = st.fixed_dictionaries({"top_n": st.integers(1, 4)})
    return st.one_of(
        st.fixed_dictionaries(
            {"mode": st.just("interval"), "interval": st.integers(1, 60), **first, **common}
        ),
        st.fixed_dictionaries({"mode": st.just("positions"), "positions": rising, **common}),
        st.fixed_dictionaries({"mode": st.just("entropy"), "entropy": entropy, **first, **common}),
    )


async def grown(branching: Branching, prompt: int, max_tokens: int, seed: int) -> GroupAnswer:
    options = GroupOptions(
        id="g",
        n=branching.max_leaves,
        prompt_token_ids=[1] * prompt,
        sampling=Sampling(max_tokens=max_tokens),
    )
    plan = Plan(
        branching=branching,
        prompt_length=prompt,
        max_length=prompt + max_tokens,
        block_size=BLOCK,
    )
    sampler = TreeSampler(plan, options)
    engine = Whimsical(seed)
    await engine.start("v0")
    answer = await Group(options=options, sampler=sampler).run(engine, lambda part: None)
    assert answer is not None, "nothing suspends the tree"
    assert sampler.paths.budget.num_future_leaves == 0, (
        "leaves are still to come, and nothing grows"
    )
    assert not engine.running
    return answer


@settings(deadline=None, max_examples=num_examples(150))
@given(trees(), st.integers(1, 40), st.integers(1, 150), st.integers(0, 99))
def test_every_bound_of_a_tree_holds(
    asked: dict[str, Any], prompt: int, most: int, seed: int
) -> None:
    branching = Branching.model_validate(asked)
    answer = asyncio.run(grown(branching, prompt, most, seed))
    assert answer.outcome == "done"
    gap = branching.min_gap
    if branching.mode == "interval":
        gap = min(gap, branching.interval)
    segments = {segment.id: segment for segment in answer.segments or ()}
    assert answer.leaves is not None
    assert 1 <= len(answer.leaves) <= branching.max_leaves
    assert answer.num_generated_tokens <= branching.max_new_tokens_total
    ends: dict[str, int] = {}
    for segment in segments.values():
        start = prompt if segment.parent is None else ends[segment.parent]
        ends[segment.id] = start + len(segment.token_ids)
        assert segment.depth <= branching.max_depth
        assert ends[segment.id] <= prompt + most
        assert len(segment.token_ids) > 0
        if segment.finish_reason == "cut":
            assert ends[segment.id] % BLOCK == 1
            assert segment.parent is None or len(segment.token_ids) >= gap
            assert segment.id not in answer.leaves or branching.max_new_tokens_total < 10**6


def test_interval_below_the_default_gap_is_kept() -> None:
    branching = Branching(mode="interval", interval=8)
    plan = Plan(branching=branching, prompt_length=20, max_length=116, block_size=16)
    assert [plan.cut(20, 1), plan.cut(33, 2), plan.cut(49, 3)] == [33, 49, 65]


@given(st.integers(1, 10**6), st.integers(1, 4096))
def test_next_cut_is_the_first_at_which_a_child_prefills_one_token(length: int, block: int) -> None:
    place = next_cut(length, block)
    assert length <= place < length + block
    assert (place - 1) % block == 0


@given(st.integers(1, 100), st.integers(1, 100))
def test_leaves_are_split_evenly_and_none_is_lost(share: int, parts: int) -> None:
    shares = split(share, parts)
    assert sum(shares) == share
    assert len(shares) == min(share, parts)
    assert max(shares) - min(shares) <= 1


@given(st.integers(0, 60), st.lists(st.integers(1, 9), max_size=5), st.integers(0, 4))
def test_leaves_are_assigned_to_segments_that_can_use_them(
    leaves: int, capacities: list[int], per_cut: int
) -> None:
    dealt = distribute_leaves(leaves, capacities, per_cut=per_cut)
    assert sum(map(sum, dealt)) == min(leaves, per_cut * sum(capacities))
    for shares, capacity in zip(dealt, capacities, strict=True):
        assert len(shares) <= per_cut
        assert all(0 < share <= capacity for share in shares)

"""A plan is small, serves every possible step, and stays within its budget."""

import pytest

from engine.cudagraphs.allowed_shapes import CaptureLimits, tlt_shapes, vllm_shapes
from engine.cudagraphs.draft_lengths import DraftLengthTiers
from engine.cudagraphs.plan_score import GraphMemory, PerLengthLookup, score, step_cost
from engine.cudagraphs.planner import MAX_STEP_SLOWDOWN, BudgetTooSmall, Plan, plan
from engine.cudagraphs.shapes import GraphShape, Trace, decode, mixed

MEMORY = GraphMemory(graph_bytes=6 * 2**20, token_bytes=10**5)
TIERS = ["0", "3", "8:0,2,4,8 32:0,2,4 64:0,2 0", "4:8,15 16:0,4 64:2 0", "2:1 4:0 8:1 0"]
TIERED = "8:0,2,4,8 32:0,2,4 64:0,2 0"


def limits(text: str, max_sequences: int = 256, max_batched_tokens: int = 2048) -> CaptureLimits:
    return CaptureLimits(
        lengths=DraftLengthTiers.parse(text),
        max_sequences=max_sequences,
        max_batched_tokens=max_batched_tokens,
    )


def plan_of(text: str, budget_bytes: int | None = None, trace: Trace | None = None) -> Plan:
    return plan(limits(text), MEMORY, budget_bytes=budget_bytes, trace=trace)


def allowed(limits: CaptureLimits) -> list[GraphShape]:
    return [
        decode(samples, query_len)
        for query_len in limits.lengths.query_lens
        for samples in limits.lengths.samples(query_len, limits.max_samples(query_len))
    ]


@pytest.mark.parametrize("text", TIERS)
def test_any_length_that_may_be_chosen_has_a_graph(text: str) -> None:
    ladder = PerLengthLookup(plan_of(text).shapes)
    assert all(ladder.find(shape) for shape in allowed(limits(text)))
    assert all(ladder.find(mixed(tokens)) for tokens in range(1, 513))


@pytest.mark.parametrize("text", TIERS)
def test_no_length_has_graphs_for_more_samples_than_may_choose_it(text: str) -> None:
    for shape in plan_of(text).shapes:
        if shape.query_len is not None:
            largest = max(limits(text).lengths.samples(shape.query_len, 256))
            assert shape.samples <= largest


@pytest.mark.parametrize("text", TIERS)
def test_plan_is_ordered_for_its_capture(text: str) -> None:
    shapes = plan_of(text).shapes
    kinds = [shape.query_len is not None for shape in shapes]
    assert kinds == sorted(kinds)
    for kind in (False, True):
        tokens = [shape.tokens for shape in shapes if (shape.query_len is not None) is kind]
        assert tokens == sorted(tokens, reverse=True)
    assert len(set(shapes)) == len(shapes)


@pytest.mark.parametrize("budget_mib", [60, 100, 200, 400, 10_000])
def test_plan_stays_within_its_budget(budget_mib: int) -> None:
    made = plan_of(TIERED, budget_bytes=budget_mib * 2**20 + 512 * 10**5)
    assert made.estimated_bytes == MEMORY.total_bytes(made.shapes)
    assert made.estimated_bytes <= made.budget_bytes if made.budget_bytes else False


def test_budget_below_one_graph_per_length_is_refused_with_the_minimum() -> None:
    least = 512 * 10**5 + 5 * MEMORY.graph_bytes
    with pytest.raises(BudgetTooSmall, match=str(least)):
        plan_of(TIERED, budget_bytes=least - 1)
    assert len(plan_of(TIERED, budget_bytes=least).shapes) == 5


def test_larger_budget_pads_less() -> None:
    asked = dict.fromkeys(allowed(limits(TIERED)), 1.0)
    paddings = []
    for budget_mib in (100, 200, 400):
        shapes = plan_of(TIERED, budget_bytes=budget_mib * 2**20).shapes
        paddings.append(score(shapes, PerLengthLookup(shapes), asked, MEMORY).padding)
    assert paddings == sorted(paddings, reverse=True)
    assert paddings[0] > paddings[-1]


@pytest.mark.parametrize("text", TIERS)
def test_without_a_budget_steps_stay_close_to_the_sizes_of_vllm(text: str) -> None:
    asked = dict.fromkeys(allowed(limits(text)), 1.0)
    full, made = vllm_shapes(limits(text)), plan_of(text)
    theirs = score(full, PerLengthLookup(full), asked, MEMORY)
    ours = score(made.shapes, PerLengthLookup(made.shapes), asked, MEMORY)
    assert ours.padding < theirs.padding + 0.01
    assert ours.num_graphs / ours.hit_rate < theirs.num_graphs / theirs.hit_rate
    ladder = PerLengthLookup(made.shapes)
    for shape in asked:
        found = ladder.find(shape)
        assert found is not None
        assert step_cost(found.tokens) / step_cost(shape.tokens) <= 1 + MAX_STEP_SLOWDOWN


def test_plan_with_tiers_is_smaller_than_the_product_and_a_bucketed_pool() -> None:
    made = plan_of(TIERED)
    theirs = (tlt_shapes(limits(TIERED)), vllm_shapes(limits(TIERED)))
    for shapes, share in zip(theirs, (0.5, 0.4), strict=True):
        assert MEMORY.total_bytes(made.shapes) < share * MEMORY.total_bytes(shapes)
    assert theirs[0] < theirs[1]


def test_budget_follows_the_recorded_steps() -> None:
    trace = Trace(((decode(37, 1), 500), (decode(5, 5), 400), (mixed(100), 20)))
    budget = 15 * MEMORY.graph_bytes + MEMORY.pool_bytes([mixed(512)])
    asked = {shape: float(steps) for shape, steps in trace.runs}
    scores = []
    for made in (plan_of(TIERED, budget), plan_of(TIERED, budget, trace)):
        scores.append(score(made.shapes, PerLengthLookup(made.shapes), asked, MEMORY))
    blind, told = scores
    assert told.padding < blind.padding / 2
    assert told.hit_rate == blind.hit_rate == 1


def test_recorded_steps_impossible_under_the_settings_are_ignored() -> None:
    strange = Trace(
        ((decode(40, 9), 10), (decode(300, 1), 10), (mixed(5000), 10), (GraphShape(9, 0), 1))
    )
    assert plan_of(TIERED, trace=strange) == plan_of(TIERED)


def test_no_graph_is_larger_than_a_step() -> None:
    small = limits("100:8 0", max_sequences=100, max_batched_tokens=256)
    made = plan(small, MEMORY, budget_bytes=None)
    assert max(shape.tokens for shape in made.shapes) <= 256
    assert PerLengthLookup(made.shapes).find(decode(28, 9)) is not None
    assert PerLengthLookup(made.shapes).find(decode(29, 9)) is None


def test_plan_is_serialized_as_text() -> None:
    made = plan_of(TIERED, budget_bytes=2**30)
    assert Plan.from_json(made.to_json()) == made

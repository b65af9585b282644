"""CUDA graphs of the draft model's passes: captured shapes, dispatch and replays."""

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from engine.cudagraphs.plan_from_environment import GRAPHS_ENV
from engine.cudagraphs.planner import Plan
from engine.cudagraphs.shapes import decode, mixed
from tests.engine.drafter.draft_runner import (
    LONGEST,
    MAX_TOKENS,
    Runner,
    Verified,
    capture,
    make_runner,
    without_gpu,
)

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
PLAN = Plan(
    shapes=(mixed(16), decode(2, 3), decode(1, 3), decode(4, 1), decode(1, 1)),
    estimated_bytes=0,
    budget_bytes=None,
)


@pytest.fixture(scope="module", autouse=True)
def no_gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, without_gpu(patch):
        yield


def captured(**attention: Any) -> Runner:
    runner = make_runner(**attention)
    capture(runner)
    return runner


def replays(graphs: Any) -> dict[tuple[int, int], int]:
    """Number of replays by samples and tokens per sample."""
    return {
        (desc.num_reqs, desc.uniform_token_count): graph.num_replays
        for desc, graph in graphs.graphs.items()
        if graph.num_replays
    }


@pytest.mark.parametrize("updates_metadata", [True, False])
def test_step_that_drafts_replays_a_graph_per_pass(updates_metadata: bool) -> None:
    runner = captured(updates_metadata=updates_metadata)
    runner.add("a", PROMPT)
    runner.step(["a"], LONGEST)
    before = replays(runner.speculator.later_pass_graphs)
    runner.step(["a"], LONGEST, Verified(num_drafts=LONGEST, num_accepted=1))
    after = replays(runner.speculator.later_pass_graphs)
    assert replays(runner.speculator.first_pass_graphs) == {(1, LONGEST + 2): 1}
    assert (before, after) == ({(1, 1): LONGEST - 1}, {(1, 1): 2 * (LONGEST - 1)})


@pytest.mark.parametrize("updates_metadata", [True, False])
def test_drafts_with_graphs_are_those_without(updates_metadata: bool) -> None:
    graphs, eager = captured(updates_metadata=updates_metadata), make_runner()
    for runner in (graphs, eager):
        for name in ("a", "b", "c"):
            runner.add(name, [*PROMPT, len(name)][: ord(name) - 92])
    draw, drafted = Random(4), 0
    for _ in range(16):
        length = draw.choice([0, 1, 2, LONGEST])
        verified = Verified(num_drafts=drafted, num_accepted=draw.randint(0, drafted))
        names = ["a", "b", "c"] if draw.random() < 0.7 else ["b", "c"]
        made = [runner.step(names, length, verified, prompt_tokens=4) for runner in (graphs, eager)]
        assert made[0] == made[1]
        drafted = length if len(names) == 3 else 0
    assert replays(graphs.speculator.first_pass_graphs)


def test_step_with_prefill_runs_its_first_pass_without_a_graph() -> None:
    runner = captured()
    runner.add("a", PROMPT)
    runner.step(["a"], LONGEST)
    assert replays(runner.speculator.first_pass_graphs) == {}


def test_planned_numbers_of_samples_are_captured_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(GRAPHS_ENV, PLAN.to_json())
    speculator = captured().speculator
    first, later = (
        {(d.num_reqs, d.uniform_token_count) for d in graphs.graphs}
        for graphs in (speculator.first_pass_graphs, speculator.later_pass_graphs)
    )
    assert first == {(2, 4), (1, 4), (1, 2)}
    assert later == {(1, 1), (2, 1)}


def test_first_passes_beyond_the_batch_limit_are_not_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wide = Plan(shapes=(decode(4, 4),), estimated_bytes=0, budget_bytes=None)
    assert wide.shapes[0].tokens == MAX_TOKENS
    monkeypatch.setenv(GRAPHS_ENV, wide.to_json())
    assert captured().speculator.first_pass_graphs.graphs == {}


def test_batch_is_padded_to_the_next_planned_number_of_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(GRAPHS_ENV, Plan(shapes=(decode(4, 3),), **_no_bytes()).to_json())
    runner, eager = captured(), make_runner()
    for one in (runner, eager):
        for name in ("a", "b", "c"):
            one.add(name, PROMPT[: ord(name) - 93])
    made = [one.step(["a", "b", "c"], 2) for one in (runner, eager)]
    assert made[0] == made[1]
    assert replays(runner.speculator.later_pass_graphs) == {(4, 1): 1}


@pytest.mark.parametrize(
    ("support", "first", "later"),
    [
        ("ALWAYS", True, True),
        ("UNIFORM_BATCH", False, True),
        ("UNIFORM_SINGLE_TOKEN_DECODE", False, True),
        ("NEVER", False, False),
    ],
)
def test_only_passes_that_the_attention_backend_supports_are_captured(
    support: str, first: bool, later: bool
) -> None:
    speculator = captured(graph_support=support).speculator
    assert bool(speculator.first_pass_graphs.graphs) == first
    assert bool(speculator.later_pass_graphs.graphs) == later


def _no_bytes() -> dict[str, Any]:
    return {"estimated_bytes": 0, "budget_bytes": None}

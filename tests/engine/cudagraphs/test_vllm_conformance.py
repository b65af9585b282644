"""The model of vLLM's CUDA graphs matches vLLM's classes, and they follow a plan."""

from collections.abc import Iterator
from typing import Any

import pytest

from engine.cudagraphs import graph_candidates
from engine.cudagraphs.allowed_shapes import CaptureLimits, vllm_shapes, vllm_sizes
from engine.cudagraphs.counters import COUNTERS
from engine.cudagraphs.draft_lengths import DraftLengthTiers
from engine.cudagraphs.plan_score import GraphMemory, PerLengthLookup, VllmLookup
from engine.cudagraphs.planner import Plan, plan
from engine.cudagraphs.shapes import GraphShape, decode, mixed
from tests.engine.cudagraphs.managers import Schedule, capture, config_of, manager_of, no_gpu_needed

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

MAX_TOKENS = 2048
MEMORY = GraphMemory(graph_bytes=2**20, token_bytes=2**10)
SCHEDULES: dict[str, Schedule] = {
    "0": [(1, 200, 0)],
    "3": [(1, 300, 3)],
    "8:4 32:2 0": [(1, 8, 4), (9, 32, 2), (33, 64, 0)],
    "3:15 5:8 40:1 0": [(1, 3, 15), (4, 5, 8), (6, 40, 1), (41, 600, 0)],
}


@pytest.fixture(autouse=True)
def without_gpu() -> Iterator[None]:
    with no_gpu_needed():
        yield


def limits(text: str) -> CaptureLimits:
    return CaptureLimits(
        lengths=DraftLengthTiers.parse(text),
        max_sequences=SCHEDULES[text][-1][1],
        max_batched_tokens=MAX_TOKENS,
    )


def config(text: str, sizes: list[int] | None = None) -> Any:
    most = SCHEDULES[text][-1][1]
    return config_of(SCHEDULES[text], max_sequences=most, max_tokens=MAX_TOKENS, sizes=sizes)


def steps(limits: CaptureLimits) -> list[GraphShape]:
    """Every possible decode step."""
    return [
        decode(samples, query_len)
        for query_len in limits.lengths.query_lens
        for samples in limits.lengths.samples(query_len, limits.max_sequences)
    ]


def dispatched(manager: Any, asked: GraphShape) -> GraphShape | None:
    """The decode graph that vLLM selects for a step."""
    desc = manager.dispatch(
        asked.samples, asked.tokens, asked.query_len, 0, max_query_len=asked.query_len
    )
    return (
        GraphShape(desc.num_tokens, desc.uniform_token_count) if desc.uniform_token_count else None
    )


def shapes_of(manager: Any) -> set[GraphShape]:
    return {
        GraphShape(desc.num_tokens, desc.uniform_token_count)
        for descs in manager._capture_descs.values()
        for desc in descs
    }


def planned(text: str, budget_bytes: int | None = None) -> Plan:
    return plan(limits(text), MEMORY, budget_bytes=budget_bytes, mixed_tokens=128)


def keeping_to(plan: Plan) -> Any:
    """vLLM's patched manager, without the model that its subclass captures."""
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    methods = graph_candidates.patched_methods(CudaGraphManager, plan)
    return type("Patched", (CudaGraphManager,), methods)


def capture_all(manager: Any) -> None:
    manager.capture(lambda desc, warmup: lambda mode: None)


@pytest.mark.parametrize("text", SCHEDULES)
def test_product_of_sizes_and_lengths_is_captured_by_vllm(text: str) -> None:
    configured = config(text)
    assert configured.compilation_config.cudagraph_capture_sizes == vllm_sizes(limits(text))
    assert shapes_of(manager_of(configured)) == vllm_shapes(limits(text))


@pytest.mark.parametrize("text", SCHEDULES)
def test_vllm_dispatch_matches_the_model(text: str) -> None:
    manager = manager_of(config(text))
    capture(manager)
    lookup = VllmLookup(vllm_shapes(limits(text)))
    for asked in steps(limits(text)):
        assert dispatched(manager, asked) == lookup.find(asked), asked


def test_vllm_misses_graphs_that_it_has_captured() -> None:
    """The upstream bug. Once it is fixed there, a plan's candidates need no ladder of our own."""
    text = "8:4 32:2 0"
    manager = manager_of(config(text))
    capture(manager)
    ladder = PerLengthLookup(vllm_shapes(limits(text)))
    missed = [s for s in steps(limits(text)) if ladder.find(s) and not dispatched(manager, s)]
    assert decode(33, 1) in missed and len(missed) == 22


@pytest.mark.parametrize("text", SCHEDULES)
def test_plan_is_captured_exactly_and_in_its_order(text: str) -> None:
    made = planned(text)
    manager = manager_of(config(text, made.capture_sizes), keeping_to(made))
    asked = capture(manager)
    order = [GraphShape(desc.num_tokens, desc.uniform_token_count) for desc in asked]
    assert [(s.query_len is None, s.tokens) for s in order] == [
        (s.query_len is None, s.tokens) for s in made.shapes
    ]
    assert sorted(map(str, order)) == sorted(map(str, made.shapes))
    assert len(manager.graphs) == sum(shape.query_len is not None for shape in made.shapes)


@pytest.mark.parametrize("text", SCHEDULES)
def test_every_step_finds_the_planned_graph_of_its_length(text: str) -> None:
    made = planned(text)
    manager = manager_of(config(text, made.capture_sizes), keeping_to(made))
    capture_all(manager)
    ladder = PerLengthLookup(made.shapes)
    for asked in steps(limits(text)):
        assert dispatched(manager, asked) == ladder.find(asked) is not None, asked


def test_steps_with_prompts_take_the_smallest_sufficient_mixed_graph() -> None:
    made = planned("8:4 32:2 0")
    manager = manager_of(config("8:4 32:2 0", made.capture_sizes), keeping_to(made))
    capture_all(manager)
    ladder = PerLengthLookup(made.shapes)
    for tokens in range(1, 129):
        desc = manager.dispatch(1, tokens, None, 0)
        assert GraphShape(desc.num_tokens, None) == ladder.find(mixed(tokens))
    assert manager.dispatch(1, 129, None, 0).cg_mode.name == "NONE"


def test_lengths_unknown_to_the_engine_are_refused_at_the_start() -> None:
    made = planned("8:4 32:2 0")
    with pytest.raises(graph_candidates.GraphPlanMismatch, match=r"8 x 5.*graphs\.lengths"):
        manager_of(config("0", made.capture_sizes), keeping_to(made))


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL"])
def test_backend_without_graphs_of_decode_steps_is_refused_at_the_start(mode: str) -> None:
    from vllm.config import CUDAGraphMode

    made = planned("0")
    configured = config("0", made.capture_sizes)
    configured.compilation_config.cudagraph_mode = CUDAGraphMode[mode]
    with pytest.raises(
        graph_candidates.GraphPlanMismatch, match=rf"mode {mode}\).*remove graphs\.budget_bytes$"
    ):
        manager_of(configured, keeping_to(made))


def test_graph_that_was_not_captured_is_detected() -> None:
    made = planned("0")
    manager = manager_of(config("0", made.capture_sizes), keeping_to(made))
    del manager._capture_descs[list(manager._capture_descs)[0]][0]
    with pytest.raises(
        graph_candidates.GraphPlanMismatch, match=r"were captured; missing: 200 x 1"
    ):
        capture_all(manager)


def test_vllm_profiling_of_two_graphs_is_allowed() -> None:
    made = planned("0")
    manager = manager_of(config("0", made.capture_sizes), keeping_to(made))
    manager._max_full_descs_to_capture = 2
    capture_all(manager)
    assert len(manager.graphs) == 2


def test_hits_and_misses_are_counted_by_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    free = iter([5_000, 3_000])
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (next(free), 0))
    made = planned("8:4 32:2 0", budget_bytes=2**27)
    manager = manager_of(config("8:4 32:2 0", made.capture_sizes), keeping_to(made))
    capture_all(manager)
    COUNTERS.reset()
    manager.dispatch(7, 35, 5, 0, max_query_len=5)
    manager.dispatch(40, 120, 3, 0, max_query_len=3)
    manager.dispatch(40, 90, None, 0, max_query_len=3)
    manager.dispatch(9, 100, None, 0)
    counted = COUNTERS.read()
    assert counted is not None
    assert (counted["hits"], counted["mixed"]) == (1, 1)
    assert counted["misses"] == [(64, 3, 1), (64, 0, 1)]
    assert (counted["num_graphs"], counted["measured_bytes"]) == (len(made.shapes), 2_000)
    assert (counted["budget_bytes"], counted["estimated_bytes"]) == (2**27, made.estimated_bytes)


def test_only_the_manager_of_the_runner_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, ModelCudaGraphManager
    from vllm.v1.worker.gpu.model_runner import ModelCudaGraphManager as ofTheRunner

    made = planned("0")
    for name in graph_candidates.patched_methods(ModelCudaGraphManager, made):
        monkeypatch.setattr(ModelCudaGraphManager, name, getattr(ModelCudaGraphManager, name))
    graph_candidates.install_plan(made)
    configured = config("0", made.capture_sizes)
    assert shapes_of(manager_of(configured, ofTheRunner)) == set(made.shapes)
    assert len(shapes_of(manager_of(configured, CudaGraphManager))) > len(made.shapes)

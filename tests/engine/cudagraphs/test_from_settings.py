"""Capture plans from the settings, and the counts reported for all ranks."""

import logging
from pathlib import Path

import pytest

from engine.cudagraphs.counters import Counters, Snapshot, aggregate_ranks
from engine.cudagraphs.plan_from_environment import graph_plan
from engine.cudagraphs.plan_from_settings import graph_memory, plan_for_start
from engine.cudagraphs.planner import Plan
from engine.cudagraphs.settings import GraphsSettings
from engine.cudagraphs.shapes import decode
from engine.launch.environment import engine_environment
from engine.settings import EngineSettings
from engine.types.feature_stats import CudaGraphStats
from tests.engine.cudagraphs.managers import SEEDLING

BUDGETED = GraphsSettings(budget_bytes=2**26)
PLAN = Plan(shapes=(decode(4, 1),), estimated_bytes=5, budget_bytes=6)


def start(
    engine: EngineSettings,
    graphs: GraphsSettings,
    *,
    longest_draft: int = 0,
    on_cpu: bool = False,
) -> Plan | None:
    return plan_for_start(engine, graphs, longest_draft, SEEDLING, on_cpu=on_cpu)


def test_without_a_budget_vllm_captures_its_default() -> None:
    assert start(EngineSettings(), GraphsSettings()) is None


@pytest.mark.parametrize(("eager", "on_cpu"), [(None, True), (True, False)])
def test_budget_without_graphs_has_no_effect_and_is_logged(
    eager: bool | None, on_cpu: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        settings = EngineSettings(eager=eager)
        assert start(settings, BUDGETED, on_cpu=on_cpu) is None
    assert [record.message for record in caplog.records] == [
        "graphs.budget_bytes has no effect: none are captured on CPU or with eager"
    ]


def test_each_shape_is_captured_twice_with_adapters() -> None:
    settings = EngineSettings(max_adapters=2)
    one, two = (graph_memory(e, SEEDLING) for e in (EngineSettings(), settings))
    assert two.graph_bytes == 2 * one.graph_bytes and two.token_bytes == one.token_bytes


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
def test_vllm_captures_each_shape_twice_with_adapters() -> None:
    from vllm.config import CompilationConfig, LoRAConfig
    from vllm.v1.worker.gpu.lora_utils import get_lora_capture_cases

    lora = LoRAConfig(max_lora_rank=8, max_loras=4)
    assert len(get_lora_capture_cases(lora, CompilationConfig())) == 2
    assert len(get_lora_capture_cases(None, CompilationConfig())) == 1


def test_budget_on_a_gpu_makes_a_plan() -> None:
    made = start(EngineSettings(), BUDGETED)
    assert made is not None and made.estimated_bytes <= 2**26
    assert made.max_samples == {0: 1024}  # an H100


@pytest.mark.parametrize(
    ("lengths", "max_samples"),
    [(None, {0: 256, 1: 256, 2: 256, 4: 32, 6: 8}), ("8:0,3 0", {0: 256, 3: 8})],
)
def test_lengths_of_the_drafter_are_planned(
    lengths: str | None, max_samples: dict[int, int]
) -> None:
    made = start(
        EngineSettings(max_sequences=256, max_batched_tokens=2048),
        GraphsSettings(budget_bytes=2**27, lengths=lengths),
        longest_draft=6,
    )
    assert made is not None and made.max_samples == max_samples


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("graphs", [GraphsSettings(), BUDGETED])
def test_engine_and_vllm_receive_the_plan(graphs: GraphsSettings) -> None:
    from tests.engine.made_arguments import arguments_and_environment

    settings = EngineSettings(max_sequences=8, max_batched_tokens=64)
    plan = start(settings, graphs)
    arguments, variables = arguments_and_environment(settings, SEEDLING, graphs=graphs)
    sizes = arguments.compilation_config.cudagraph_capture_sizes
    assert sizes == (None if plan is None else plan.capture_sizes)
    with engine_environment(
        settings, of_features=variables, on_cpu=False, temp_dir=Path("/scratch")
    ):
        assert graph_plan() == plan
    assert graph_plan() is None


def test_nothing_is_counted_before_a_plan_is_captured() -> None:
    counts = Counters()
    counts.record_decode(samples=3, query_len=1, hit=True)
    assert counts.read() is None
    assert aggregate_ranks([None, None]) == aggregate_ranks([]) == CudaGraphStats()


def test_steps_are_those_of_one_rank_and_bytes_the_maximum() -> None:
    def rank(measured_bytes: int) -> Snapshot | None:
        counts = Counters()
        counts.set_plan(PLAN, measured_bytes)
        counts.record_decode(samples=1, query_len=1, hit=True)
        counts.reset()
        for samples in (3, 4, 5):
            counts.record_decode(samples=samples, query_len=3, hit=False)
        counts.record_decode(samples=1, query_len=1, hit=True)
        counts.record_mixed()
        return counts.read()

    assert aggregate_ranks([rank(70), rank(90)]) == CudaGraphStats(
        num_graphs=1,
        budget_bytes=6,
        estimated_bytes=5,
        measured_bytes=90,
        hits=1,
        mixed=1,
        misses={(4, 3): 2, (8, 3): 1},
    )

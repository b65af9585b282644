"""vLLM's config for a drafter, and configurations that cannot have one."""

from pathlib import Path

import pytest

from engine.cudagraphs.plan_from_settings import set_planned_graphs
from engine.cudagraphs.planner import Plan
from engine.cudagraphs.shapes import decode, mixed
from engine.speculation.settings import SpeculationSettings
from engine.speculation.startup import resolve_mode
from tests.engine.made_arguments import engine_arguments
from tests.engine.seedling import MODEL, settings

DRAFTER = SpeculationSettings(mode="drafter", drafter=Path("/drafter"), longest_draft=5)


def test_vllm_receives_the_drafter_and_every_possible_length() -> None:
    arguments = engine_arguments(
        settings(tensor_parallel_size=2), MODEL, speculation=DRAFTER, on_cpu=True
    )
    assert arguments.max_model_len == 1024 + 5
    assert arguments.speculative_config == {
        "method": "draft_model",
        "model": "/drafter",
        "draft_tensor_parallel_size": 2,
        "draft_sample_method": "greedy",
        "num_speculative_tokens": 5,
        "num_speculative_tokens_per_batch_size": [
            *((1, 1, 5), (2, 2, 4), (3, 3, 3), (4, 4, 2), (5, 5, 1), (6, 64, 0))
        ],
    }


@pytest.mark.parametrize(
    ("max_sequences", "schedule"),
    [(64, [(1, 1, 5), (2, 2, 2), (3, 64, 0)]), (2, [(1, 1, 5), (2, 2, 2)])],
)
def test_with_planned_graphs_vllm_receives_their_lengths(
    max_sequences: int, schedule: list[tuple[int, int, int]]
) -> None:
    plan = Plan(
        shapes=(decode(64, 1), decode(32, 3), decode(8, 6), mixed(128)),
        estimated_bytes=1,
        budget_bytes=2,
    )
    arguments = engine_arguments(
        settings(max_sequences=max_sequences),
        MODEL,
        speculation=DRAFTER,
        on_cpu=False,
    )
    set_planned_graphs(arguments, plan)
    told = arguments.speculative_config
    assert told is not None
    assert told["num_speculative_tokens_per_batch_size"] == schedule


def test_pipeline_parallelism_has_no_drafter() -> None:
    assert resolve_mode(DRAFTER, settings()) == DRAFTER
    assert resolve_mode(DRAFTER, settings(pipeline_parallel_size=2)).mode == "off"

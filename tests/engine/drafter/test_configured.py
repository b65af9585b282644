"""What vLLM is told of a drafter, and where there can be none."""

from pathlib import Path

from engine.arguments import engine_arguments
from engine.settings import SpeculationSettings
from engine.speculation.start import resolved
from tests.engine.seedling import MODEL, settings

DRAFTER = SpeculationSettings(mode="drafter", drafter=Path("/drafter"), longest_draft=5)


def test_vllm_is_told_of_the_drafter_and_of_one_length_for_every_batch_size() -> None:
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
        "num_speculative_tokens_per_batch_size": [(1, 64, 5)],
    }


def test_layers_that_are_dealt_out_have_no_drafter() -> None:
    assert resolved(DRAFTER, settings()) == DRAFTER
    assert resolved(DRAFTER, settings(pipeline_parallel_size=2)).mode == "off"

"""Block size and batch limits: the server's on CPU, vLLM's on a GPU, the operator's if set."""

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs

from engine.launch import arguments
from engine.launch.arguments import USAGE_CONTEXT
from engine.settings import EngineSettings
from engine.speculation.settings import SpeculationSettings
from tests.engine.made_arguments import engine_arguments
from tests.engine.seedling import MODEL

DRAFTING = SpeculationSettings(mode="siblings", longest_draft=4)


def limits(
    *, on_cpu: bool, speculation: SpeculationSettings | None = None, **changes: int
) -> tuple[int | None, int | None, int | None]:
    settings = EngineSettings(max_context_tokens=64, **changes)
    made = engine_arguments(
        settings, MODEL, on_cpu=on_cpu, speculation=speculation or SpeculationSettings(mode="off")
    )
    return made.block_size, made.max_num_seqs, made.max_num_batched_tokens


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's limits on an H100, by kind of use."""
    defaults = ({USAGE_CONTEXT: 8192}, {USAGE_CONTEXT: 1024})
    monkeypatch.setattr(AsyncEngineArgs, "get_batch_defaults", lambda world_size: defaults)


def test_limits_on_cpu_are_those_of_the_server() -> None:
    assert limits(on_cpu=True) == (32, 256, 2048)


def test_limits_on_a_gpu_are_left_to_vllm() -> None:
    assert limits(on_cpu=False) == (None, None, None)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_configured_limits_are_used(on_cpu: bool) -> None:
    given = limits(on_cpu=on_cpu, block_size=64, max_sequences=3, max_batched_tokens=77)
    assert given == (64, 3, 77)


@pytest.mark.usefixtures("h100")
def test_speculation_on_a_gpu_plans_with_the_limits_of_vllm() -> None:
    assert limits(on_cpu=False, speculation=DRAFTING) == (None, 1024, 8192)
    assert limits(on_cpu=False, speculation=DRAFTING, max_sequences=9000) == (None, 9000, 9000)


def test_limits_of_vllm_are_those_of_a_server() -> None:
    tokens, sequences = AsyncEngineArgs.get_batch_defaults(1)
    assert USAGE_CONTEXT in tokens and USAGE_CONTEXT in sequences
    assert arguments.DEFAULT_CPU_SEQUENCES == 256

"""Settings of data-parallel engines: refusals, threads, and sums of counters."""

import os
import re
from types import SimpleNamespace
from typing import Any

import pytest

from engine.cudagraphs.counters import aggregate_engines
from engine.cudagraphs.settings import GraphsSettings
from engine.errors import StartFailed
from engine.launch.environment import engine_environment
from engine.launch.ranks.data_parallel import check_model
from engine.measure_baseline import measure
from engine.settings import EngineSettings
from engine.speculation.settings import SpeculationSettings
from engine.speculation.startup import resolve_mode, why_off
from engine.types.feature_stats import CudaGraphStats, KvRetentionStats, SharedPrefixStats, total
from engine.vllm_engine import VllmEngine
from tests.engine.made_arguments import engine_arguments
from tests.engine.seedling import MODEL


def two(**changes: Any) -> EngineSettings:
    return EngineSettings(data_parallel_size=2, **changes)


def test_size_is_passed_to_vllm() -> None:
    arguments = engine_arguments(two(), MODEL, on_cpu=True)
    assert (arguments.data_parallel_size, arguments.data_parallel_rank) == (2, None)


@pytest.mark.parametrize("mode", ["siblings", "drafter"])
def test_explicit_speculation_is_refused(mode: Any) -> None:
    with pytest.raises(StartFailed, match=f"speculation.mode {mode} exclude each other"):
        VllmEngine(two(), speculation=SpeculationSettings(mode=mode))


def test_automatic_speculation_is_off_with_the_reason() -> None:
    auto = SpeculationSettings(mode="auto")
    assert resolve_mode(auto, two()).mode == "off"
    assert "there are several" in (why_off(auto, two()) or "")


async def test_baseline_of_several_engines_is_refused() -> None:
    with pytest.raises(StartFailed, match="set engine.data_parallel_size: 1"):
        await measure(
            two(),
            speculation=SpeculationSettings(),
            graphs=GraphsSettings(),
        )


def test_several_machines_are_refused() -> None:
    with pytest.raises(StartFailed, match=re.escape("engine.nnodes above 1 exclude each other")):
        VllmEngine(two(nnodes=2, tensor_parallel_size=2))


def test_prompt_kv_on_gpus_is_refused() -> None:
    with pytest.raises(StartFailed, match=re.escape("engine.prompt_kv_gpu_bytes exclude")):
        VllmEngine(two(prompt_kv_gpu_bytes=2**20))


@pytest.mark.parametrize(("size", "is_moe"), [(1, True), (2, False)])
def test_dense_model_or_one_engine_is_accepted(size: int, is_moe: bool) -> None:
    check_model(config(size, is_moe=is_moe))


def test_experts_on_several_engines_are_refused() -> None:
    with pytest.raises(StartFailed, match="mixture-of-experts"):
        check_model(config(2, is_moe=True))


def config(size: int, *, is_moe: bool) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=size),
        model_config=SimpleNamespace(is_moe=is_moe),
    )


def test_threads_are_divided_among_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert two().threads_per_rank == 4
    assert two(tensor_parallel_size=2).threads_per_rank == 2
    assert two(cpu_threads=3).threads_per_rank == 3


def test_threads_of_several_engines_are_not_bound_to_the_same_processors(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KMP_AFFINITY", "GOMP_CPU_AFFINITY", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)
    threads = len(os.sched_getaffinity(0))
    with engine_environment(two(cpu_threads=threads), on_cpu=True, temp_dir=tmp_path):
        assert os.environ["OMP_NUM_THREADS"] == str(threads)
        assert not {"KMP_AFFINITY", "GOMP_CPU_AFFINITY"} & os.environ.keys()


def test_counters_of_engines_are_added() -> None:
    one = SharedPrefixStats(steps_grouped=1, rows_grouped=4, steps_skipped={"isa": 2})
    other = SharedPrefixStats(steps_grouped=2, steps_skipped={"isa": 1, "dtype": 5})
    assert total([one, other]) == SharedPrefixStats(
        steps_grouped=3, rows_grouped=4, steps_skipped={"isa": 3, "dtype": 5}
    )
    kept = KvRetentionStats(num_blocks=2, num_sessions=1, num_released={"ended": 1})
    assert total([kept, KvRetentionStats()]) == kept


def test_graphs_of_engines_are_the_same_and_their_steps_are_added() -> None:
    one = CudaGraphStats(
        num_graphs=3,
        budget_bytes=9,
        estimated_bytes=8,
        measured_bytes=7,
        hits=1,
        misses={(2, 1): 1},
    )
    other = CudaGraphStats(
        num_graphs=3, budget_bytes=9, estimated_bytes=8, measured_bytes=6, hits=2, mixed=1
    )
    assert aggregate_engines([one, other]) == CudaGraphStats(
        num_graphs=3,
        budget_bytes=9,
        estimated_bytes=8,
        measured_bytes=7,
        hits=3,
        mixed=1,
        misses={(2, 1): 1},
    )

"""Environment variables of the engine's processes, and their restoration."""

import os
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from engine.attention import settings as attention_settings
from engine.attention.settings import AttentionSettings
from engine.launch.environment import engine_environment
from engine.runtime.process_environment import (
    cache_directory,
    started_by_coppice,
)
from engine.settings import EngineSettings
from engine.settings.base import Section
from engine.speculation.settings import SpeculationSettings, settings_of_environment
from tests.engine.made_arguments import features_of

SCRATCH = Path("/scratch")


def threads(**changes: int) -> EngineSettings:
    return EngineSettings(**changes)


def environment_of(**sections: Section) -> AbstractContextManager[None]:
    """Environment of an engine with these settings of features."""
    variables = features_of(threads(), **sections).environment()
    return engine_environment(threads(), of_features=variables, on_cpu=True, temp_dir=SCRATCH)


def test_environment_is_restored_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    before, affinity = dict(os.environ), os.sched_getaffinity(0)
    with engine_environment(threads(), on_cpu=True, temp_dir=SCRATCH):
        assert started_by_coppice()
        os.environ["ADDED"] = "by vLLM"
        os.sched_setaffinity(0, {min(affinity)})
    assert dict(os.environ) == before
    assert os.sched_getaffinity(0) == affinity
    assert not started_by_coppice()


def test_engine_processes_receive_the_attention_mode() -> None:
    attention = AttentionSettings(shared_prefix="always")
    with environment_of(attention=attention):
        assert attention_settings.process_settings() == attention


def test_engine_processes_receive_the_cache_directory() -> None:
    settings = EngineSettings(cache_directory=Path("/kept"))
    with engine_environment(settings, on_cpu=True, temp_dir=SCRATCH):
        assert cache_directory("attention") == Path("/kept/attention")


def test_engine_processes_receive_speculation_and_room_for_drafts() -> None:
    for speculation in (SpeculationSettings(mode="off"), SpeculationSettings(mode="siblings")):
        with environment_of(speculation=speculation):
            assert settings_of_environment() == speculation
            longer = os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1"
            assert longer == (speculation.mode == "siblings")


CPUS = sorted(os.sched_getaffinity(0))
ALL = len(CPUS)


def test_one_rank_gets_its_threads_through_openmp() -> None:
    with engine_environment(threads(cpu_threads=ALL), on_cpu=True, temp_dir=SCRATCH):
        assert os.environ["OMP_NUM_THREADS"] == str(ALL)
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        places = ",".join(map(str, CPUS))
        assert f"proclist=[{places}]" in os.environ["KMP_AFFINITY"]


def test_several_ranks_get_a_cpu_list_each() -> None:
    with engine_environment(
        threads(tensor_parallel_size=ALL, cpu_threads=1),
        on_cpu=True,
        temp_dir=SCRATCH,
    ):
        if ALL > 1:
            assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "|".join(map(str, CPUS))
            assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_threads_are_placed_on_free_processors(
    num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: None)
    settings = threads(tensor_parallel_size=num_ranks, cpu_threads=3)
    with engine_environment(settings, on_cpu=True, temp_dir=SCRATCH):
        assert os.environ["OMP_NUM_THREADS"] == "3"
        assert "KMP_AFFINITY" not in os.environ and "GOMP_CPU_AFFINITY" not in os.environ
        assert os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == {1: None, 2: "nobind"}[num_ranks]


def test_exactly_one_openmp_runtime_is_preloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/x/libgomp-a1b2.so.1:/x/libtcmalloc.so.4:/x/libomp.so")
    with engine_environment(threads(), on_cpu=True, temp_dir=SCRATCH):
        names = [Path(library).name for library in os.environ["LD_PRELOAD"].split(":")]
    assert names == ["libtcmalloc.so.4", "libiomp5.so"]


def test_gpu_engine_keeps_its_threads() -> None:
    with engine_environment(threads(), on_cpu=False, temp_dir=SCRATCH):
        assert "OMP_NUM_THREADS" not in os.environ or "KMP_AFFINITY" not in os.environ
        assert os.environ["VLLM_PLUGINS"] == "coppice"


def test_without_a_compiler_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with engine_environment(threads(), on_cpu=True, temp_dir=SCRATCH):
        assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
    with engine_environment(EngineSettings(eager=False), on_cpu=True, temp_dir=SCRATCH):
        assert "TORCHDYNAMO_DISABLE" not in os.environ


def test_existing_compiler_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.touch(mode=0o755)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with engine_environment(threads(), on_cpu=True, temp_dir=SCRATCH):
        assert "TORCHDYNAMO_DISABLE" not in os.environ


def test_vllm_has_no_step_timeout() -> None:
    """Its deadline would include time in which a machine is suspended."""
    with engine_environment(threads(), on_cpu=True, temp_dir=SCRATCH):
        assert int(os.environ["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"]) > 24 * 3600

"""EngineCore's process, started before vLLM starts EngineCore."""

import os
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from multiprocessing import Pipe
from multiprocessing.connection import Listener, wait
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.launch import environment
from engine.launch.core_preload import compiles_in_core
from engine.launch.preloaded_core import (
    PreloadedContext,
    PreloadedCore,
    preload_core,
    start_variables,
)
from engine.settings import EngineSettings
from tests.engine.process_report import MODULE, report, report_probe, send_one
from tests.tools import compiler

MODULES = (MODULE, "there_is_no_such_module")
SECONDS = 60.0  # on a busy machine


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Iterator[PreloadedCore]:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # set by the Makefile
    started = PreloadedCore(MODULES)
    yield started
    started.close()


def report_of(
    core: PreloadedCore, address: Path, target: Callable[[str], None] = report
) -> tuple[Any, ...]:
    with Listener(str(address), "AF_UNIX") as listener:
        process = PreloadedContext(core).Process(target=target, name="Core", args=(str(address),))
        process.start()
        with listener.accept() as connection:
            received: tuple[Any, ...] = connection.recv()
        process.join(SECONDS)
        assert process.exitcode == 0 and process.pid == received[0]
    return received


def test_process_runs_in_the_preloaded_interpreter_with_the_later_environment(
    core: PreloadedCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADDED", "later")
    pid = core.pid
    assert report_of(core, tmp_path / "socket") == (pid, pid, "later", True)


def test_second_process_is_spawned(core: PreloadedCore, tmp_path: Path) -> None:
    first = report_of(core, tmp_path / "first")
    second = report_of(core, tmp_path / "second")
    assert first[0] == core.pid != second[0]


def test_process_is_spawned_if_a_variable_that_is_read_at_the_start_has_changed(
    core: PreloadedCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert report_of(core, tmp_path / "socket")[0] != core.pid
    assert not psutil.pid_exists(core.pid)


def test_process_is_spawned_if_the_interpreter_has_ended(
    core: PreloadedCore, tmp_path: Path
) -> None:
    os.kill(core.pid, 9)
    wait([core.sentinel], SECONDS)
    assert report_of(core, tmp_path / "socket")[0] != core.pid


def test_process_that_inherits_a_file_descriptor_is_spawned(core: PreloadedCore) -> None:
    receiver, sender = Pipe(duplex=False)
    process = PreloadedContext(core).Process(target=send_one, args=(sender,))
    process.start()
    assert receiver.recv() == 1
    process.join(SECONDS)
    assert process.exitcode == 0 and process.pid != core.pid


def test_interpreter_ends_without_output_if_the_service_does(
    capfd: pytest.CaptureFixture[str],
) -> None:
    core = PreloadedCore(MODULES)
    core.hand_over()  # so that nothing kills it
    os.close(core.data)
    assert wait([core.sentinel], SECONDS)
    assert os.waitpid(core.pid, 0)[1] == 0
    os.close(core.sentinel)
    assert capfd.readouterr().err == ""


def test_close_kills_the_interpreter_once(core: PreloadedCore) -> None:
    core.close()
    core.close()
    assert not psutil.pid_exists(core.pid)


def test_only_variables_that_are_read_at_the_start_are_compared() -> None:
    environment = {"LD_PRELOAD": "a", "TORCHDYNAMO_DISABLE": "1", "VLLM_RPC_BASE_PATH": "b"}
    assert set(start_variables(environment)) == {"LD_PRELOAD", "TORCHDYNAMO_DISABLE"}


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="no C++ compiler: vLLM probes with one")
@pytest.mark.parametrize(("ranks", "expected"), [("0", (1, 1)), ("1", (0, 0))])
def test_instruction_sets_are_probed_in_a_thread_if_the_sampler_runs_in_this_process(
    ranks: str,
    expected: tuple[int, int],
    core: PreloadedCore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", ranks)
    assert report_of(core, tmp_path / "socket", report_probe)[1:] == expected


def test_instruction_sets_are_not_probed_without_compilation() -> None:
    single = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    assert compiles_in_core(single)
    assert not compiles_in_core(single | {"TORCHDYNAMO_DISABLE": "1"})
    assert not compiles_in_core({})


def test_nothing_is_started_on_several_machines() -> None:
    """The address of machine 0 would be resolved first, for up to two minutes."""
    settings = EngineSettings(
        nnodes=2, tensor_parallel_size=2, master_addr="unknown.invalid", prompt_kv=False
    )
    assert preload_core(settings) is None


def test_nothing_is_started_where_vllm_preloads_an_openmp_library_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_distribution(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(environment, "distribution", no_distribution)
    assert preload_core(EngineSettings()) is None

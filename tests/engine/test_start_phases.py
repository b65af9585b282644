"""Phases of a start: what a rank reports is logged and shown by the service."""

import asyncio
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tqdm import tqdm

from engine.runtime import start_phases
from engine.runtime.feature_guard import FeatureState
from engine.runtime.start_phases import FILE_ENV, FILE_NAME, StartPhases, phase
from engine.types.info import StartPhase
from engine.vllm_engine import VllmEngine
from tests.engine.seedling import settings
from tests.invariants.service_process import home, service

ORDER = [
    "reading model files",
    "starting processes",
    "loading weights",
    "profiling memory",
    "allocating the KV cache",
    "warming up",
    "warming up the sampler",
]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """This process as a rank of an engine whose temporary directory is `tmp_path`."""
    clock = Clock()
    on = FeatureState(on=True, num_failures=0, reason=None)
    monkeypatch.setattr(start_phases.FEATURE, "state", on)
    monkeypatch.setattr(start_phases, "_file", None)
    monkeypatch.setattr(start_phases, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setenv(FILE_ENV, str(tmp_path / FILE_NAME))
    yield clock
    if start_phases._file is not None:
        os.close(start_phases._file)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    caplog.set_level(logging.INFO)
    yield lambda: [r.getMessage().removeprefix("start: ") for r in logged(caplog.records)]


def logged(records: list[logging.LogRecord]) -> list[logging.LogRecord]:
    return [record for record in records if record.name == start_phases.__name__]


def following(directory: Path, clock: Clock) -> StartPhases:
    phases = StartPhases(clock)
    phases.follow(directory)
    return phases


class Worker:
    rank = 0
    parallel_config = SimpleNamespace(local_world_size=2)

    def load_model(self) -> str:
        with phase("compiling"):
            return "loaded"


def load(number: int) -> str:
    worker = type("Rank", (Worker,), {"rank": number, "load_model": Worker.load_model})
    start_phases._install_in(worker)
    loaded: str = worker().load_model()
    return loaded


def test_phases_of_a_rank_are_logged_with_their_seconds(
    rank: Clock, tmp_path: Path, lines: Any
) -> None:
    phases = following(tmp_path, rank)
    phases.read()
    assert phases.current() is None
    start_phases._open_file(0, 1)
    with phase("loading weights"):
        rank.now += 2
        with phase("compiling"):
            phases.read()
            rank.now += 3
            assert phases.current() == StartPhase(name="compiling", seconds=3)
        phases.read()
        assert phases.current() == StartPhase(name="loading weights", seconds=5)
    phases.read()
    assert phases.current() is None
    begun = ["loading weights", "compiling"]
    assert lines() == [*begun, "compiling took 3.0 s", "loading weights took 5.0 s"]


def test_long_phase_is_logged_every_15_s_with_its_progress(
    rank: Clock, tmp_path: Path, lines: Any
) -> None:
    phases = following(tmp_path, rank)
    start_phases._open_file(0, 1)
    with phase("capturing CUDA graphs"):
        bar = start_phases._with_progress(tqdm)
        for _ in bar(range(4), disable=True):
            rank.now += 15
            phases.read()
            phases.log_current()
    name = "capturing CUDA graphs"
    ticks = [f"{name}, 30 s (1 of 4)", f"{name}, 45 s (2 of 4)", f"{name}, 60 s (3 of 4)"]
    assert lines() == [name, *ticks]


def test_only_the_first_rank_of_the_first_engine_reports(rank: Clock, tmp_path: Path) -> None:
    phases = following(tmp_path, rank)
    assert load(1) == "loaded"
    assert not (tmp_path / FILE_NAME).exists()
    assert load(2) == "loaded"  # the first rank of the second machine
    phases.read()
    reported = (tmp_path / FILE_NAME).read_bytes()
    assert [json.loads(line)[1] for line in reported.splitlines()] == [
        *("loading weights", "compiling"),
        *("compiling", "loading weights"),
    ]
    start_phases._open_file(0, 1)  # of another engine
    assert (tmp_path / FILE_NAME).read_bytes() == reported
    assert start_phases.FEATURE.state.on


@pytest.mark.parametrize("path", [None, "/no/such/directory/phases", "/proc/phases"])
def test_rank_without_a_file_is_silent(
    rank: Clock, monkeypatch: pytest.MonkeyPatch, path: str | None
) -> None:
    monkeypatch.delenv(FILE_ENV)
    if path is not None:
        monkeypatch.setenv(FILE_ENV, path)
    assert load(0) == "loaded"
    assert start_phases.FEATURE.state.on


def test_failure_to_report_does_not_fail_the_start(
    rank: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_only = os.open(os.devnull, os.O_RDONLY)
    monkeypatch.setattr(start_phases, "_file", read_only)
    monkeypatch.delenv(FILE_ENV)
    assert load(0) == "loaded"
    assert not start_phases.FEATURE.state.on


def test_unreadable_report_does_not_fail_the_start(rank: Clock, tmp_path: Path) -> None:
    phases = following(tmp_path, rank)
    (tmp_path / FILE_NAME).write_text("no report\n")
    with phases.phase("starting processes"):
        pass
    assert phases.current() is None


def test_incomplete_line_is_read_when_it_is_complete(rank: Clock, tmp_path: Path) -> None:
    phases, file = following(tmp_path, rank), tmp_path / FILE_NAME
    line = json.dumps(["begin", "compiling", 99.0])
    file.write_text(line[:10])
    phases.read()
    assert phases.current() is None
    file.write_text(line + "\n")
    phases.read()
    assert phases.current() == StartPhase(name="compiling", seconds=1)


def test_phase_that_fails_is_not_logged_as_complete(
    rank: Clock, tmp_path: Path, lines: Any
) -> None:
    phases = following(tmp_path, rank)
    start_phases._open_file(0, 1)
    with pytest.raises(ValueError, match="no memory"), phase("loading weights"):
        raise ValueError("no memory")
    phases.read()
    assert phases.current() is None
    assert lines() == ["loading weights"]


async def test_phases_end_with_the_start_that_fails(rank: Clock, tmp_path: Path) -> None:
    phases = following(tmp_path, rank)
    with pytest.raises(ValueError, match="no model"):
        async with phases.logged():
            with phases.phase("reading model files"):
                assert phases.current() is not None
                raise ValueError("no model")
    assert phases.current() is None


async def test_phases_are_read_while_a_start_waits(rank: Clock, tmp_path: Path, lines: Any) -> None:
    phases, polls = following(tmp_path, rank), asyncio.Queue[None]()

    async def sleep(seconds: float) -> None:
        await polls.get()

    start_phases._open_file(0, 1)
    async with phases.logged(sleep):
        await asyncio.sleep(0)
        with phase("compiling"):
            polls.put_nowait(None)
            while not lines():
                await asyncio.sleep(0)
            assert phases.current() == StartPhase(name="compiling", seconds=0)


@pytest.mark.engine
@pytest.mark.parametrize(
    "parallelism",
    ["tensor_parallel_size", pytest.param("data_parallel_size", marks=pytest.mark.exhaustive)],
)
async def test_one_of_several_ranks_reports(lines: Any, parallelism: str) -> None:
    changes: dict[str, Any] = {parallelism: 2}
    engine = VllmEngine(settings(**changes))
    try:
        await engine.start("v0")
        assert engine.health().start_phase is None
    finally:
        await engine.stop()
    assert [line for line in lines() if line in ORDER] == ORDER
    took = [line for line in lines() if re.fullmatch(r".* took \d+\.\d s", line)]
    ended = [line.rpartition(" took ")[0] for line in took]
    # A machine's first start also calibrates attention.
    assert sorted(name for name in ended if name in ORDER) == sorted(ORDER)


@pytest.mark.engine
def test_log_of_a_service_process_has_the_phases_of_its_engine() -> None:
    with home() as place, service(place) as served:
        messages = [json.loads(line)["message"] for line in served.log.splitlines() if "{" in line]
    begun = [line for line in messages if line.removeprefix("start: ") in ORDER]
    assert [line.removeprefix("start: ") for line in begun] == ORDER
    assert any(re.fullmatch(r"start: importing vLLM took \d+\.\d s", line) for line in messages)

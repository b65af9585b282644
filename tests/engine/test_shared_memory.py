"""The sweep of shared memory removes only files that no process uses."""

import mmap
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from engine.feature_base import StartSettings
from engine.features import Features
from engine.launch import processes
from engine.runtime import leftover_files
from engine.runtime.leftover_files import SHM_DIR, files_in_use, remove_leftover_shared_memory
from engine.settings import EngineSettings


def leave(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_bytes(b"x" * 4096)
        os.utime(folder / name, (0, time.time() - 60))


def test_leftovers_are_removed_and_foreign_files_stay(tmp_path: Path) -> None:
    leave(tmp_path, "psm_1", "vllm_dist_x-cpushm_0", "sem.mp-a", "somebody_elses")
    assert remove_leftover_shared_memory(tmp_path) == ["psm_1", "sem.mp-a", "vllm_dist_x-cpushm_0"]
    assert [file.name for file in tmp_path.iterdir()] == ["somebody_elses"]


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder in shared memory: other filesystems report another device for mapped files."""
    with TemporaryDirectory(dir=SHM_DIR) as folder:
        yield Path(folder)


def test_file_opened_or_mapped_by_a_living_process_stays(shared: Path) -> None:
    leave(shared, "psm_open", "psm_mapped")
    with (shared / "psm_open").open("rb"):
        with (shared / "psm_mapped").open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        assert remove_leftover_shared_memory(shared) == []
        mapped.close()
    assert remove_leftover_shared_memory(shared) == ["psm_mapped", "psm_open"]


def test_file_with_the_same_inode_elsewhere_protects_nothing(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(shared, "psm_left")
    left = (shared / "psm_left").stat()
    elsewhere = left.st_dev + 1, left.st_ino
    monkeypatch.setattr(leftover_files, "files_in_use", lambda: iter([elsewhere, *files_in_use()]))
    assert remove_leftover_shared_memory(shared) == ["psm_left"]


def test_semaphore_in_use_stays_though_mapped_under_another_name() -> None:
    before = set(os.listdir(SHM_DIR))
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    (name,) = {entry for entry in os.listdir(SHM_DIR) if entry.startswith("sem.mp-")} - before
    os.utime(SHM_DIR / name, (0, time.time() - 60))
    remove_leftover_shared_memory()
    assert (SHM_DIR / name).exists()
    del semaphore


def test_recently_created_file_stays(tmp_path: Path) -> None:
    (tmp_path / "psm_new").touch()
    assert remove_leftover_shared_memory(tmp_path) == []


def test_machine_without_shared_memory_has_nothing_to_sweep(tmp_path: Path) -> None:
    assert remove_leftover_shared_memory(tmp_path / "missing") == []


MAPPING_WORKER = """
import mmap, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open("/proc/self/comm", "w") as name:
    name.write("VLLM::Worker")
file = open(sys.argv[1], "rb")
mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
print("mapped", flush=True)
time.sleep(600)
"""


@contextmanager
def mapping_worker(file: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A child process with the name of a worker, which maps a file and ignores SIGTERM."""
    with subprocess.Popen(
        [sys.executable, "-c", MAPPING_WORKER, str(file)], stdout=subprocess.PIPE
    ) as worker:
        try:
            assert worker.stdout is not None and worker.stdout.readline() == b"mapped\n"
            yield worker
        finally:
            worker.kill()


class LateKill:
    """An AsyncLLM whose shutdown returns before the process that it kills has ended."""

    output_handler = None

    def __init__(self, worker: subprocess.Popen[bytes]) -> None:
        self._worker = worker

    def shutdown(self, timeout: float) -> None:
        self._worker.terminate()
        threading.Timer(timeout, self._worker.kill).start()


async def test_stop_removes_files_that_a_killed_process_mapped_until_its_end(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(shared, "psm_mapped")
    monkeypatch.setattr(
        processes,
        "remove_leftover_shared_memory",
        lambda: remove_leftover_shared_memory(shared),
    )
    settings = EngineSettings()
    engine: Any = processes.VllmProcesses(
        settings, Features(StartSettings(engine=settings)), worker_extension=""
    )
    with mapping_worker(shared / "psm_mapped") as worker:
        engine._llm = LateKill(worker)
        await engine.stop()
        assert list(shared.iterdir()) == []

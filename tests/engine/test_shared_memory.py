"""The sweep of shared memory removes only files that no process uses."""

import mmap
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from engine.runtime import leftover_files
from engine.runtime.leftover_files import SHM_DIR, files_in_use, remove_leftover_shared_memory


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

"""The sweep of stale folders removes none that is locked or about to be locked."""

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine.runtime import leftover_files
from engine.runtime.leftover_files import acquire_lock, create_locked_dir, try_acquire

PREFIX = "place-"


def created(parent: Path, locks: ExitStack) -> Path:
    path, lock = create_locked_dir(PREFIX, parent)
    locks.enter_context(lock)
    return path


@pytest.fixture
def locks() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_folder_belongs_to_its_owner_until_the_lock_is_closed(
    tmp_path: Path, locks: ExitStack
) -> None:
    path, lock = create_locked_dir(PREFIX, tmp_path)
    other = created(tmp_path, locks)
    assert path.is_dir() and other != path
    lock.close()
    third = created(tmp_path, locks)
    assert not path.exists() and other.is_dir() and third.is_dir()


def test_foreign_folder_is_left_alone(tmp_path: Path, locks: ExitStack) -> None:
    (tmp_path / "place-file").touch()
    (tmp_path / "place-unlocked").mkdir()
    (tmp_path / "other").mkdir()
    created(tmp_path, locks)
    assert {"place-file", "place-unlocked", "other"} < {path.name for path in tmp_path.iterdir()}


def test_locking_a_folder_under_removal_fails(tmp_path: Path) -> None:
    path = tmp_path / "made"
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    answers = list[bool]()
    owner = threading.Thread(target=lambda: answers.append(acquire_lock(file)))
    with try_acquire(path) as is_left:
        owner.start()
        owner.join(0.1)
        assert is_left and owner.is_alive(), "it waits for the sweep"
        path.unlink()
    owner.join(30)
    os.close(file)
    assert answers == [False]


def test_folder_swept_before_it_was_locked_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: ExitStack
) -> None:
    late = list[int]()

    def own_late(file: int) -> bool:
        late.append(file)
        if len(late) == 1:
            created(tmp_path, locks)
        return acquire_lock(file)

    monkeypatch.setattr(leftover_files, "acquire_lock", own_late)
    path = created(tmp_path, locks)
    assert len(late) == 3, "the first, the sweeping one's, and the first anew"
    assert (path / ".owner").exists()

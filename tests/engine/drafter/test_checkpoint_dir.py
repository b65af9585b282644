"""Drafters on disk, from one run to the next."""

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.drafter.service.bootstrap import open_folder
from engine.drafter.service.checkpoint_dir import FIRST, Folder
from engine.drafter.service.model_init import write_fresh
from engine.errors import StartFailed
from engine.weights.checkpoint import read_served
from tests.engine.random_models import CONFIG, random_tensors, write_model


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_model(tmp_path / "target", random_tensors(1, tied=True), tied=True)


Opened = Callable[..., Folder]


@pytest.fixture
def opened(tmp_path: Path, target: Path) -> Opened:
    def opening(given: Path | None = None) -> Folder:
        return open_folder(tmp_path / "kept", given, target, read_served(target), ranks=1)

    return opening


def test_what_was_settled_serves_after_the_next_start(opened: Opened, tmp_path: Path) -> None:
    folder = opened()
    assert folder.serving == FIRST
    (tmp_path / "new").write_bytes(folder.file(FIRST).read_bytes())
    folder.take(folder.bring(tmp_path / "new"), "better")
    folder.settle("better")
    folder.close()
    again = opened()
    assert again.serving == "better"
    assert (again.start / "model.safetensors").resolve() == again.file("better").resolve()
    assert not again.file(FIRST).exists()
    assert read_served(again.start).tensors
    again.close()


def test_what_was_half_done_when_the_owner_was_killed_is_swept(opened: Opened) -> None:
    folder = opened()
    left = [folder.path / name for name in ("published-3.safetensors", ".x.part", "a.safetensors")]
    for file in left:
        file.write_bytes(b"half")
    checkpoint = folder.path / "training.safetensors"
    checkpoint.write_bytes(b"kept")
    folder.close()
    opened().close()
    assert not any(file.exists() for file in left)
    assert checkpoint.exists()


def test_a_folder_that_has_lost_what_served_begins_anew(opened: Opened) -> None:
    folder = opened()
    (folder.path / "serving.json").unlink()
    folder.close()
    again = opened()
    assert again.serving == FIRST and read_served(again.start).tensors
    again.close()


def test_a_second_server_of_the_same_model_has_a_folder_of_its_own(opened: Opened) -> None:
    one, other = opened(), opened()
    assert one.path != other.path
    other.close()
    assert not other.path.exists()
    one.close()
    assert one.path.exists()


def test_another_drafter_is_another_folder(opened: Opened, drafter_folder: Path) -> None:
    made, given = opened(), opened(drafter_folder)
    assert made.path != given.path
    assert given.file(FIRST).read_bytes() == (drafter_folder / "model.safetensors").read_bytes()
    made.close()
    given.close()


def test_a_drafter_of_another_vocabulary_is_refused(opened: Opened, tmp_path: Path) -> None:
    from engine.drafter.service.model_init import config_for

    write_fresh(tmp_path / "other", config_for(CONFIG | {"vocab_size": 77}, 1, ranks=1))
    with pytest.raises(StartFailed, match="77 tokens"):
        opened(tmp_path / "other")

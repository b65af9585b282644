"""Drafters on disk, from one run to the next."""

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.drafter.service.checkpoint_dir import INITIAL_VERSION, DrafterDir
from engine.drafter.service.initial_model import open_drafter_dir, write_random_model
from engine.errors import StartFailed
from engine.weights.checkpoint import read_base_checkpoint
from tests.engine.random_models import CONFIG, random_tensors, write_model


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_model(tmp_path / "target", random_tensors(1, tied=True), tied=True)


Opened = Callable[..., DrafterDir]


@pytest.fixture
def opened(tmp_path: Path, target: Path) -> Opened:
    def opening(given: Path | None = None) -> DrafterDir:
        return open_drafter_dir(
            tmp_path / "kept", given, target, read_base_checkpoint(target), ranks=1
        )

    return opening


def test_promoted_drafter_serves_after_the_next_start(opened: Opened, tmp_path: Path) -> None:
    folder = opened()
    assert folder.serving == INITIAL_VERSION
    (tmp_path / "new").write_bytes(folder.file(INITIAL_VERSION).read_bytes())
    folder.assign_version(folder.import_file(tmp_path / "new"), "better")
    folder.set_serving("better")
    folder.close()
    again = opened()
    assert again.serving == "better"
    assert (again.start / "model.safetensors").resolve() == again.file("better").resolve()
    assert not again.file(INITIAL_VERSION).exists()
    assert read_base_checkpoint(again.start).tensors
    again.close()


def test_partial_files_of_a_killed_owner_are_removed(opened: Opened) -> None:
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


def test_directory_without_its_serving_drafter_starts_anew(opened: Opened) -> None:
    folder = opened()
    (folder.path / "serving.json").unlink()
    folder.close()
    again = opened()
    assert again.serving == INITIAL_VERSION and read_base_checkpoint(again.start).tensors
    again.close()


def test_second_server_of_the_same_model_has_its_own_directory(opened: Opened) -> None:
    one, other = opened(), opened()
    assert one.path != other.path
    other.close()
    assert not other.path.exists()
    one.close()
    assert one.path.exists()


def test_another_drafter_has_another_directory(opened: Opened, drafter_folder: Path) -> None:
    made, given = opened(), opened(drafter_folder)
    assert made.path != given.path
    assert (
        given.file(INITIAL_VERSION).read_bytes()
        == (drafter_folder / "model.safetensors").read_bytes()
    )
    made.close()
    given.close()


def test_drafter_with_another_vocabulary_is_refused(opened: Opened, tmp_path: Path) -> None:
    from engine.drafter.service.initial_model import make_drafter_config

    write_random_model(
        tmp_path / "other", make_drafter_config(CONFIG | {"vocab_size": 77}, 1, ranks=1)
    )
    with pytest.raises(StartFailed, match="77 tokens"):
        opened(tmp_path / "other")

"""The engine's directory for sockets."""

from pathlib import Path

import pytest

from engine.runtime.leftover_files import TempDir


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_directory_is_removed_with_its_engine(temporary: Path) -> None:
    temp_dir = TempDir()
    (temp_dir.path / "socket").touch()
    temp_dir.close()
    temp_dir.close()
    assert list(temporary.iterdir()) == []


def test_directory_of_a_dead_engine_is_removed_and_others_stay(temporary: Path) -> None:
    dead = temporary / "coppice-engine-dead"
    dead.mkdir()
    (dead / ".owner").touch()
    living = TempDir()
    other = TempDir()
    assert not dead.exists() and living.path.exists()
    living.close()
    other.close()


def test_directory_under_construction_stays(temporary: Path) -> None:
    unready = temporary / "coppice-engine-new"
    unready.mkdir()
    TempDir().close()
    assert unready.exists()

import json
from pathlib import Path

import pytest

from coppice.weights.checkpoint_files import checkpoint_files
from tests.client.checkpoints import INDEX, sharded, single


def test_file_is_a_checkpoint(tmp_path: Path) -> None:
    path = single(tmp_path / "step-3.safetensors")
    checkpoint = checkpoint_files(path)
    assert (checkpoint.files, checkpoint.sharded) == ((path,), False)


def test_directory_with_one_file_is_that_file(tmp_path: Path) -> None:
    path = single(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = checkpoint_files(tmp_path)
    assert (checkpoint.files, checkpoint.sharded) == ((path,), False)


def test_directory_with_an_index_is_the_files_it_lists(tmp_path: Path) -> None:
    files = sharded(tmp_path)
    checkpoint = checkpoint_files(tmp_path)
    assert (checkpoint.files, checkpoint.sharded) == (tuple(files), True)


def test_several_files_need_an_index(tmp_path: Path) -> None:
    single(tmp_path / "a.safetensors")
    single(tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=r"2 \.safetensors files and no model"):
        checkpoint_files(tmp_path)


def test_empty_directory_is_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"0 \.safetensors files"):
        checkpoint_files(tmp_path)


def test_missing_path_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        checkpoint_files(tmp_path / "nowhere")


def test_missing_shard_is_named(tmp_path: Path) -> None:
    shard = sharded(tmp_path)[2]
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=shard.name):
        checkpoint_files(tmp_path)


@pytest.mark.parametrize("length", [0, 4, 20, -1])
def test_truncated_file_is_reported_before_anything_is_sent(tmp_path: Path, length: int) -> None:
    path = single(tmp_path / "model.safetensors")
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        checkpoint_files(path)


@pytest.mark.parametrize("index", [[], {}, {"weight_map": {}}, {"weight_map": "w"}])
def test_index_without_a_weight_map_is_reported(tmp_path: Path, index: object) -> None:
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="weight_map"):
        checkpoint_files(tmp_path)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "sub/a.safetensors"])
def test_index_may_not_leave_its_directory(tmp_path: Path, name: str) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(ValueError, match="outside of its directory"):
        checkpoint_files(tmp_path)

"""The hand-over of a weights file to a server on the same host, from the client's side."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from coppice.weights.image import HashedChunks, SafetensorsImage
from coppice.weights.local_upload import TOKEN_FILE, LocalFile, is_loopback, is_shared
from coppice.weights.safetensors_writer import tensors_of
from coppice.wire.weights import LocalDirectory


@pytest.fixture
def directory(tmp_path: Path) -> LocalDirectory:
    path = tmp_path / "local"
    path.mkdir(mode=0o700)
    (path / TOKEN_FILE).write_text("secret")
    return LocalDirectory(path=str(path), token="secret")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://localhost", True),
        ("http://[::1]:8000/prefix", True),
        ("http://10.0.0.1:8000", False),
        ("https://coppice.example", False),
    ],
)
def test_only_loopback_addresses_may_be_the_same_host(url: str, expected: bool) -> None:
    assert is_loopback(url) == expected


def test_directory_is_shared_if_the_token_is_there(directory: LocalDirectory) -> None:
    assert is_shared(directory)
    assert not is_shared(directory.model_copy(update={"token": "another"}))
    assert not is_shared(directory.model_copy(update={"path": directory.path + "x"}))


def test_directory_that_others_can_open_is_not_used(directory: LocalDirectory) -> None:
    Path(directory.path).chmod(0o755)
    assert not is_shared(directory)


def test_link_to_a_directory_is_not_used(directory: LocalDirectory, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(directory.path)
    assert not is_shared(directory.model_copy(update={"path": str(tmp_path / "link")}))


def test_file_has_the_bytes_of_the_image(directory: LocalDirectory) -> None:
    image = SafetensorsImage(tensors_of({"w": np.arange(2**20), "b": np.ones(3)}))
    file = LocalFile(directory)
    for _ in file.write(image.chunks()):
        pass
    path = Path(directory.path) / file.name
    assert path.read_bytes() == b"".join(image.chunks())
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size == image.num_bytes
    file.close()
    assert not path.exists()


def test_file_is_deleted_if_writing_fails(directory: LocalDirectory) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"part"
        raise OSError(28, "No space left on device")

    file = LocalFile(directory)
    with pytest.raises(OSError, match="No space"):
        for _ in file.write(chunks()):
            pass
    file.close()
    assert not list(Path(directory.path).glob("*.safetensors"))


def test_pass_that_was_not_completed_has_no_digest() -> None:
    hashed = HashedChunks()
    chunks = hashed.of([b"a", b"b"])
    next(chunks)
    chunks.close()
    assert hashed.digest == b""

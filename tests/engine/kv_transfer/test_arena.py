"""A worker never writes outside the arena, and detects errors before the first byte."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.kv_transfer.worker.mapped_arena import ArenaError, MappedArena
from engine.types.kv import ExportStatus

SIZE = 8192


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "arena"
    with file.open("xb") as opened:
        os.posix_fallocate(opened.fileno(), 0, SIZE)
    return file


@pytest.fixture
def arena(path: Path) -> Iterator[MappedArena]:
    arena = MappedArena(path)
    yield arena
    arena.close()


def test_written_bytes_are_in_the_file(arena: MappedArena, path: Path) -> None:
    arena.region(64, 3)[:] = 7
    arena.write_status(SIZE - 8, ExportStatus.COMMITTED)
    stored = path.read_bytes()
    assert stored[63:68] == bytes([0, 7, 7, 7, 0])
    assert stored[-8:] == (1).to_bytes(8, "little")
    assert sum(stored) == 22


@pytest.mark.parametrize(
    ("offset", "num_bytes"), [(-64, 64), (SIZE, 64), (SIZE - 64, 65), (0, SIZE + 1), (8, 8), (0, 0)]
)
def test_region_outside_or_misaligned_is_refused(
    arena: MappedArena, offset: int, num_bytes: int
) -> None:
    with pytest.raises(ArenaError):
        arena.region(offset, num_bytes)


@pytest.mark.parametrize("offset", [-8, SIZE, SIZE - 4, 12])
def test_status_word_outside_or_misaligned_is_refused(
    arena: MappedArena, path: Path, offset: int
) -> None:
    with pytest.raises(ArenaError):
        arena.write_status(offset, ExportStatus.COMMITTED)
    assert path.read_bytes() == bytes(SIZE)


def test_shrunken_file_is_refused(arena: MappedArena, path: Path) -> None:
    os.truncate(path, SIZE // 2)
    arena.region(0, SIZE // 2)
    with pytest.raises(ArenaError):
        arena.region(64, SIZE // 2)


def test_region_of_a_sparse_file_is_allocated(tmp_path: Path) -> None:
    """On a full filesystem a store into a hole would raise SIGBUS."""
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 2**20)
    arena = MappedArena(path)
    arena.region(2**19, 2**16)
    assert 2**16 <= path.stat().st_blocks * 512 < 2**18
    arena.close()


def test_region_is_refused_where_the_filesystem_is_full(
    arena: MappedArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ArenaError, match="cannot be allocated: No space left"):
        arena.region(0, 64)


def test_foreign_file_is_refused(tmp_path: Path, path: Path) -> None:
    link, empty = tmp_path / "link", tmp_path / "empty"
    link.symlink_to(path)
    empty.touch()
    for wrong in (link, empty, tmp_path / "missing"):
        with pytest.raises(ArenaError):
            MappedArena(wrong)

"""The arena's file (permissions, size limits, removal of stale files) and its allocator."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from service.kv.arena import (
    MAX_DEFAULT_BYTES,
    MIN_BYTES,
    PAGE_BYTES,
    PREFIX,
    Arena,
    Extent,
    ExtentAllocator,
    default_arena_bytes,
    remove_stale_arenas,
)
from tests.sample_sizes import num_examples

ROOT = Path(__file__).parents[3]
WANTED_BYTES = 4 * 2**20
# A container has 64 MiB of shared memory by default.
_ON_64_MIB = """
import os, subprocess, sys
from pathlib import Path
from service.kv.arena import Arena

mount = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(mount)], check=True)
half = Arena.create(mount, 2**30)
half_bytes = half.num_bytes
assert half.back(0, half_bytes)
half.view[half_bytes - 1] = 1
half.close()
sparse = Arena.create(mount, 2**26, get_free_bytes=lambda _: 2**30)
# Another process allocates memory between the check and the allocation.
late = Arena.create(mount, 2**30, get_free_bytes=lambda _: 2**30, preallocate=True)
for page in range(0, late.num_bytes, 4096):
    late.view[page] = 1
print(half_bytes, late.num_bytes, sparse.back(0, 2**20), sparse.back(0, 2**26))
"""
NUM_PAGES = 24


def created(directory: Path, wanted_bytes: int = WANTED_BYTES) -> Arena:
    arena = Arena.create(directory, wanted_bytes)
    assert arena is not None
    return arena


def test_preallocated_arena_has_all_its_pages(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path, WANTED_BYTES, preallocate=True)
    assert arena is not None
    assert 512 * arena.path.stat().st_blocks >= WANTED_BYTES
    arena.close()


@pytest.mark.parametrize(
    ("free", "num_bytes"),
    [(2**26, 0), (2**27 - 2, 0), (2**27, 2**26), (2**32, 2**31), (2**40, MAX_DEFAULT_BYTES)],
)
def test_default_size_is_half_of_the_free_memory_within_bounds(free: int, num_bytes: int) -> None:
    assert default_arena_bytes(free) == num_bytes


def test_files_have_owner_permissions_a_random_name_and_only_the_pages_in_use(
    tmp_path: Path,
) -> None:
    arenas = [created(tmp_path) for _ in range(2)]
    for arena in arenas:
        status = arena.path.stat()
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_size == WANTED_BYTES > 512 * status.st_blocks
        assert arena.back(0, WANTED_BYTES)
        assert 512 * arena.path.stat().st_blocks >= WANTED_BYTES
        assert len(arena.view) == arena.num_bytes == WANTED_BYTES
    assert arenas[0].path != arenas[1].path
    assert len(arenas[0].path.name.removeprefix(PREFIX)) == 32
    for arena in arenas:
        arena.close()
    assert list(tmp_path.iterdir()) == []


def test_arena_takes_at_most_half_of_the_free_memory(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path, WANTED_BYTES, get_free_bytes=lambda _: 3 * 2**20)
    assert arena is not None
    assert arena.num_bytes == 3 * 2**19
    arena.close()


def test_no_arena_where_almost_nothing_is_free(tmp_path: Path) -> None:
    assert Arena.create(tmp_path, WANTED_BYTES, get_free_bytes=lambda _: MIN_BYTES) is None
    assert list(tmp_path.iterdir()) == []


def test_no_arena_without_shared_memory(tmp_path: Path) -> None:
    assert Arena.create(tmp_path / "missing", WANTED_BYTES) is None


def test_only_files_of_killed_servers_are_removed(tmp_path: Path) -> None:
    living = created(tmp_path)
    left = (
        "import os, sys; from pathlib import Path; from service.kv.arena import Arena\n"
        f"Arena.create(Path({str(tmp_path)!r}), 2**20); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", left], cwd=ROOT, env=environment(), check=False)
    (tmp_path / "somebody-elses").touch()
    assert len(list(tmp_path.iterdir())) == 3
    (swept,) = remove_stale_arenas(tmp_path)
    assert swept != living.path.name
    assert {file.name for file in tmp_path.iterdir()} == {living.path.name, "somebody-elses"}
    living.close()


def test_no_arena_where_allocation_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert Arena.create(tmp_path, WANTED_BYTES) is None
    assert list(tmp_path.iterdir()) == []


def test_arena_under_construction_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ownership is taken before its bytes are allocated, which takes a while."""
    allocate, swept = os.posix_fallocate, list[str]()

    def allocate_slowly(file: int, offset: int, num_bytes: int) -> None:
        swept.extend(remove_stale_arenas(tmp_path))
        allocate(file, offset, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", allocate_slowly)
    arena = created(tmp_path)
    assert swept == [] and arena.path.exists()
    arena.close()


def test_on_a_mount_of_64_MiB_the_arena_is_smaller_and_fully_writable(
    tmp_path: Path,
) -> None:
    alone = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode != 0:
        pytest.skip("needs to be allowed to mount")
    command = [*alone, sys.executable, "-c", _ON_64_MIB, str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(32 * 2**20), str(16 * 2**20), "True", "False"]


def environment() -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "client"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


class Pages(RuleBasedStateMachine):
    """The model: the set of allocated pages."""

    taken = Bundle("taken")

    def __init__(self) -> None:
        super().__init__()
        self.extents = ExtentAllocator(NUM_PAGES * PAGE_BYTES)
        self.pages: set[int] = set()

    @rule(target=taken, num_bytes=st.integers(1, (NUM_PAGES + 1) * PAGE_BYTES))
    def allocate(self, num_bytes: int) -> Extent | None:
        num_pages = -(-num_bytes // PAGE_BYTES)
        extent = self.extents.allocate(num_bytes)
        fits = any(
            self.pages.isdisjoint(range(start, start + num_pages))
            for start in range(NUM_PAGES - num_pages + 1)
        )
        assert (extent is not None) == fits
        if extent is not None:
            assert extent.num_bytes == num_pages * PAGE_BYTES
            mine = pages_of(extent)
            assert self.pages.isdisjoint(mine)
            self.pages |= mine
        return extent

    @rule(extent=consumes(taken))
    def release(self, extent: Extent | None) -> None:
        if extent is not None:
            self.extents.release(extent)
            self.pages -= pages_of(extent)

    @invariant()
    def accounts_are_consistent(self) -> None:
        self.extents.check()
        assert self.extents.free_bytes == (NUM_PAGES - len(self.pages)) * PAGE_BYTES


def pages_of(extent: Extent) -> set[int]:
    return set(range(extent.start // PAGE_BYTES, extent.end // PAGE_BYTES))


Pages.TestCase.settings = settings(
    max_examples=num_examples(60),
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
)
TestPages = Pages.TestCase


def test_double_free_is_detected() -> None:
    extents = ExtentAllocator(4 * PAGE_BYTES)
    extent = extents.allocate(1)
    assert extent is not None
    extents.release(extent)
    with pytest.raises(AssertionError, match="not allocated"):
        extents.release(extent)


def test_empty_arena_has_no_room() -> None:
    extents = ExtentAllocator(0)
    assert extents.allocate(1) is None
    extents.check()

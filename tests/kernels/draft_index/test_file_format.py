"""A saved store loads completely or its file is refused; both implementations write equal files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.draft_index import store as compiled
from kernels.draft_index import store_protocol
from kernels.draft_index.file_format import StoreContents, _dtype
from kernels.draft_index.store import DraftStore
from kernels.draft_index.store_protocol import (
    MAX_COUNT,
    NUM_CELLS,
    NUM_COARSE_CELLS,
    InvalidStoreFile,
    Store,
)
from tests.kernels.draft_index.reference import ReferenceStore
from tests.kernels.draft_index.stores import array, assert_alike, draft, run_step

MAX_BYTES = 2**20
is_built = pytest.mark.skipif(
    not compiled.is_built(),
    reason="the library was not built: no C++ compiler when it was installed",
)
STORES = [ReferenceStore, pytest.param(DraftStore, marks=is_built)]
FINISHED = [
    ([1, 2, 3], [5, 7, 8, 9, 10, 11, 12, 13, 7, 8]),
    ([4, 5], [6, 7, 8, 9, 10, 11, 12, 13, 7, 8]),
    ([1, 2, 3], [6, 7, 8, 9, 20, 11, 12, 13, 7, 8]),
]


def filled(kind: Callable[..., Any]) -> Store:
    store: Store = kind(max_bytes=MAX_BYTES)
    for number, (prompt, response) in enumerate(FINISHED):
        slot = store.begin(b"%d" % number, array(prompt))
        run_step(store, {slot: response[:3]})
        run_step(store, {slot: response[3:]})
        store.end(slot, keep=True)
        store.age()
    run_step(store, {store.begin(b"running", array([1, 2, 3])): [99, 98, 97]})
    return store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    filled(ReferenceStore).save(tmp_path / "drafts")
    return tmp_path / "drafts"


@pytest.mark.parametrize("kind", STORES)
def test_saved_texts_are_drafted_from_again(kind: Any, tmp_path: Path) -> None:
    filled(kind).save(tmp_path / "drafts")
    store = kind.load(tmp_path / "drafts", max_bytes=MAX_BYTES)
    slot = store.begin(b"another", array([1, 2, 3]))
    assert draft(run_step(store, {slot: [5]}, limit=3)) == [7, 8, 9]
    other = store.begin(b"another", array([90]))
    assert draft(run_step(store, {other: [7, 8, 9, 10, 11, 12]}, limit=2)) == [13, 7]


@pytest.mark.parametrize("kind", STORES)
def test_running_requests_are_not_saved(kind: Any, tmp_path: Path) -> None:
    filled(kind).save(tmp_path / "drafts")
    store = kind.load(tmp_path / "drafts", max_bytes=MAX_BYTES)
    assert store.num_tokens == 3 + 2 + 3 + 10 + 2 + 10 + 3 + 10
    assert not draft(run_step(store, {store.begin(b"g", array([50])): [99, 98]}))


@is_built
def test_both_write_the_same_file_and_read_the_same_from_it(path: Path) -> None:
    filled(DraftStore).save(path.with_name("compiled"))
    assert path.read_bytes() == path.with_name("compiled").read_bytes()
    slow = ReferenceStore.load(path, max_bytes=MAX_BYTES)
    fast = DraftStore.load(path, max_bytes=MAX_BYTES)
    for store in (slow, fast):
        assert store.begin(b"0", array([1, 2, 3])) == 0
    for tokens in ([], [6, 7, 8], [9, 20, 11, 12]):
        assert_alike(fast_drafts := run_step(fast, {0: tokens}), run_step(slow, {0: tokens}))
        assert fast_drafts.lengths[0] > 0


@pytest.mark.parametrize("length", [0, 5, 16, 100, -1])
def test_truncated_file_is_refused_and_kept(length: int, path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:length])
    with pytest.raises(InvalidStoreFile, match="truncated"):
        ReferenceStore.load(path, max_bytes=MAX_BYTES)
    assert path.read_bytes() == whole[:length]


def test_any_changed_byte_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    for at in range(0, len(whole), 97):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(InvalidStoreFile):
            ReferenceStore.load(path, max_bytes=MAX_BYTES)


def test_file_of_another_format_is_refused_by_its_number(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:8] + (2).to_bytes(4, "little") + whole[12:])
    with pytest.raises(InvalidStoreFile, match="version 2, expected 1"):
        ReferenceStore.load(path, max_bytes=MAX_BYTES)


def small_contents() -> StoreContents:
    """Two prompts of two tokens; a response of one token to the first."""
    arrays: dict[str, list[int]] = {
        "prompt_lengths": [2, 2],
        "prompt_tokens": [1, 2, 3, 4],
        "text_counts": [1, 0],
        "text_lengths": [1],
        "text_ages": [0],
        "text_groups": [0],
        "text_tokens": [5],
        "log_lengths": [1],
        "log_ages": [0],
        "log_prompts": [0],
        "log_tokens": [5],
        "tried": [0] * NUM_CELLS,
        "accepted": [0] * NUM_CELLS,
        "coarse_tried": [0] * NUM_COARSE_CELLS,
        "coarse_accepted": [0] * NUM_COARSE_CELLS,
    }
    return StoreContents(**{name: np.array(arrays[name], _dtype(name)) for name in arrays})


def corrupted(_: int) -> None:
    raise OSError("no space left on device")


def test_interrupted_save_keeps_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = path.read_bytes()
    monkeypatch.setattr("os.fsync", corrupted)
    with pytest.raises(OSError, match="no space"):
        filled(ReferenceStore).save(path)
    assert path.read_bytes() == whole
    assert list(path.parent.iterdir()) == [path], "nothing half-written is left"


@pytest.mark.parametrize(
    "foreign",
    [
        {"text_counts": [store_protocol.MAX_FINISHED_TEXTS + 1, 0], "text_lengths": [1] * 129},
        {"prompt_lengths": [2, 2], "prompt_tokens": [7, 8, 7, 8]},
        {"prompt_lengths": [0, 4]},
        {"text_lengths": [0]},
        {"log_lengths": [0], "log_tokens": []},
        {"prompt_tokens": [1, 2, 3, -4]},
        {"tried": [MAX_COUNT] * NUM_CELLS},
        {"accepted": [1] * NUM_CELLS},
        {"text_ages": [0, 0]},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_inconsistent_arrays_are_refused(tmp_path: Path, foreign: dict[str, list[int]]) -> None:
    """With a valid checksum, as from a foreign writer."""
    is_valid = small_contents()
    is_valid.check()
    arrays = is_valid.arrays()
    changed = {name: np.array(foreign[name], arrays[name].dtype) for name in foreign}
    if "text_lengths" in foreign:
        number = len(foreign["text_lengths"])
        changed |= {
            "text_ages": np.zeros(number, np.uint32),
            "text_groups": np.zeros(number, np.uint64),
            "text_tokens": np.zeros(sum(foreign["text_lengths"]), np.int32),
        }
    StoreContents(**arrays | changed).write(tmp_path / "foreign")
    with pytest.raises(InvalidStoreFile, match="inconsistent arrays"):
        StoreContents.read(tmp_path / "foreign")


def test_tokens_of_another_vocabulary_are_refused(path: Path) -> None:
    assert StoreContents.read(path, 21)
    with pytest.raises(InvalidStoreFile, match="outside the vocabulary of 20"):
        StoreContents.read(path, 20)


@is_built
def test_smaller_budget_loads_the_most_recently_used(path: Path) -> None:
    small = DraftStore.load(path, max_bytes=2**14)
    slow = ReferenceStore.load(path, max_bytes=2**14)
    assert 0 < small.num_tokens == slow.num_tokens < 46
    assert small.num_bytes == slow.num_bytes <= 2**14


@is_built
def test_large_store_is_loaded_completely(tmp_path: Path) -> None:
    """100,000 tokens; bench/draft_store.py does it with ten million."""
    random = np.random.default_rng(0)
    store = DraftStore(max_bytes=2**27)
    for _ in range(100):
        slot = store.begin(b"g", random.integers(0, 50, 10).astype(np.int32))
        run_step(store, {slot: random.integers(0, 50, 1000).tolist()})
        store.end(slot, keep=True)
    store.save(tmp_path / "drafts")
    again = DraftStore.load(tmp_path / "drafts", max_bytes=2**27)
    assert again.num_tokens == store.num_tokens > 100_000
    again.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "drafts").read_bytes()

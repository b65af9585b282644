"""Store and handles together against a model, with the accounts checked after every step."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from service.cluster.registry import new_replica_id
from service.config.prompt_kv import KvSettings
from service.errors import KvGone, KvNotFound
from service.kv.arena import MIN_BYTES
from service.kv.handles.file_layout import LayoutFactory
from service.kv.handles.handle import MAX_LEASES, Handle, PromptEntry
from service.kv.handles.index import GRACE_SECONDS, HandleIndex
from service.kv.store import EntryState, KvStore
from tests.fake_engine import FakeEngine
from tests.fake_export import FORMAT
from tests.sample_sizes import num_examples

LAYOUTS = LayoutFactory("fake", FORMAT)
CAPACITY_BYTES = MIN_BYTES
SETTINGS = KvSettings(max_lease_seconds=60.0)
MAX_LIFETIME_SECONDS = MAX_LEASES * SETTINGS.max_lease_seconds
REPLICA = new_replica_id()


def opened_store(directory: Path, clock: Callable[[], float]) -> KvStore:
    store = KvStore(FakeEngine(prompt_kv=True), clock=clock)
    assert store.open(directory, CAPACITY_BYTES)
    return store


def reserved(index: HandleIndex, first: int, num_tokens: int) -> PromptEntry | None:
    return index.reserve("me", LAYOUTS.of(range(first, first + num_tokens), "v1"))


def committed(store: KvStore, index: HandleIndex) -> PromptEntry:
    entry = reserved(index, 0, 9)
    assert entry is not None
    commit(store, entry)
    return entry


def commit(store: KvStore, entry: PromptEntry) -> None:
    store.end_write(entry, is_committed=True)
    store.unpin(entry)


class HandleMachine(RuleBasedStateMachine):
    """The model: holders and readers of every handle."""

    entries = Bundle("entries")
    handles = Bundle("handles")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        clock = self.clock
        self.directory = TemporaryDirectory()
        self.store = opened_store(Path(self.directory.name), clock)
        self.index = HandleIndex(self.store, SETTINGS, replica_id=REPLICA, clock=clock)
        self.active: set[Handle] = set()
        self.pins: list[tuple[Handle, Any]] = []
        self.deadlines: dict[Handle, float] = {}

    def clock(self) -> float:
        return self.now

    @rule(target=entries, first=st.integers(0, 5), length=st.integers(1, 40))
    def reserve(self, first: int, length: int) -> PromptEntry | None:
        shared = self.index.find("me", LAYOUTS.of(range(first, first + 7 * length), "v1"))
        if shared is not None:
            return shared
        entry = reserved(self.index, first, 7 * length)
        assert entry is not None or self.store.extents.free_bytes < CAPACITY_BYTES
        return entry

    @rule(target=handles, entry=entries, lease=st.integers(1, 90))
    def commit_and_grant(self, entry: PromptEntry | None, lease: int) -> Handle | None:
        if entry is None or entry.state is EntryState.QUARANTINED:
            return None
        if entry.state is EntryState.RESERVED:
            commit(self.store, entry)
        handle = self.index.grant("me", entry, float(lease))
        self.active.add(handle)
        return handle

    @rule(entry=entries)
    def evict(self, entry: PromptEntry | None) -> None:
        """The entry stays until its writer has left the engine."""
        if entry is not None and entry.state is EntryState.RESERVED:
            self.index.evict(entry)
            assert self.store.num_bytes(EntryState.QUARANTINED) >= entry.extent.num_bytes
            self.store.unpin(entry)

    @rule(handle=handles)
    def start_lease(self, handle: Handle | None) -> None:
        if handle is not None:
            handle.start_lease()

    @rule(handle=handles)
    def release(self, handle: Handle | None) -> None:
        if handle is not None:
            self.index.release(handle.id, "me")
            self.active.discard(handle)

    @rule(handle=handles)
    def read(self, handle: Handle | None) -> None:
        if handle is None or handle not in self.active:
            return
        pin = self.index.pinned(self.index.get(handle.id, "me"))
        pin.__enter__()
        self.pins.append((handle, pin))
        self.record_deadlines()

    @rule(data=st.data())
    def end_read(self, data: st.DataObject) -> None:
        if self.pins:
            at = data.draw(st.integers(0, len(self.pins) - 1))
            self.pins.pop(at)[1].__exit__(None, None, None)

    @rule(seconds=st.integers(1, 40))
    def time_passes(self, seconds: int) -> None:
        self.record_deadlines()
        self.now += seconds
        self.record_deadlines()
        self.index.sweep()
        self.active = {handle for handle in self.active if handle.is_active}

    @invariant()
    def accounts_are_consistent(self) -> None:
        self.store.check()
        self.index.check()
        assert len(self.index) == len(self.active)

    def record_deadlines(self) -> None:
        """A read lasts at most until the last known deadline of its handle."""
        for handle in self.active:
            if handle.is_active:
                self.deadlines[handle] = handle.deadline

    @invariant()
    def pinned_or_held_entries_are_not_free(self) -> None:
        read = [handle for handle, _ in self.pins if self.deadlines[handle] > self.now]
        for entry in {handle.entry for handle, _ in self.pins}:
            assert entry.pins == sum(handle.entry is entry for handle in read)
        for handle in read:
            assert handle.entry in self.store._entries
        for handle in self.active:
            assert handle.entry.state is EntryState.COMMITTED

    @invariant()
    def only_active_handles_are_found(self) -> None:
        for handle in self.active:
            assert self.index.get(handle.id, "me") is handle
            with pytest.raises(KvNotFound):
                self.index.get(handle.id, "you")

    def teardown(self) -> None:
        """All bytes are freed."""
        for _, pin in self.pins:
            pin.__exit__(None, None, None)
        for handle in self.active:
            self.index.release(handle.id, "me")
        for entry in list(self.store._entries):
            assert isinstance(entry, PromptEntry)
            if entry.state is EntryState.RESERVED:
                self.store.unpin(entry)
            if entry.state is not EntryState.QUARANTINED:
                assert not entry.num_handles
                self.index.evict(entry)
        self.now += GRACE_SECONDS
        self.store.sweep()
        assert self.store.extents.free_bytes == CAPACITY_BYTES
        self.store.arena.close()
        self.directory.cleanup()


HandleMachine.TestCase.settings = settings(
    max_examples=num_examples(60),
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
)
TestHandles = HandleMachine.TestCase


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def granted(directory: Path, clock: Clock) -> tuple[KvStore, HandleIndex, Handle]:
    store = opened_store(directory, clock)
    index = HandleIndex(store, SETTINGS, replica_id=REPLICA, clock=clock)
    return store, index, index.grant("me", committed(store, index), 30.0)


def test_bytes_stay_untouched_for_a_while_after_their_lease_expired(tmp_path: Path) -> None:
    clock = Clock()
    store, handles, handle = granted(tmp_path, clock)
    handle.start_lease()
    clock.now = 30.0
    handles.sweep()
    with pytest.raises(KvGone):
        handles.get(handle.id, "me")
    assert store.num_bytes(EntryState.QUARANTINED) == handle.entry.extent.num_bytes
    clock.now = 30.0 + GRACE_SECONDS
    store.sweep()
    assert store.extents.free_bytes == CAPACITY_BYTES


def test_released_bytes_are_free_at_once(tmp_path: Path) -> None:
    store, handles, handle = granted(tmp_path, Clock())
    handles.release(handle.id, "me")
    handles.release(handle.id, "me")
    assert store.extents.free_bytes == CAPACITY_BYTES


def test_download_keeps_the_bytes_until_the_lease_ends(tmp_path: Path) -> None:
    clock = Clock()
    store, handles, handle = granted(tmp_path, clock)
    handle.start_lease()
    with handles.pinned(handle) as pin:
        clock.now = 29.0
        handles.release(handle.id, "me")
        pin.sweep()
        assert pin.is_open
        assert store.extents.free_bytes < CAPACITY_BYTES
        clock.now = 30.0
        pin.sweep()
        assert not pin.is_open
        assert store.extents.free_bytes == CAPACITY_BYTES
        store.check()


def test_forgotten_handle_is_unknown(tmp_path: Path) -> None:
    _, handles, handle = granted(tmp_path, Clock())
    handles.release(handle.id, "me")
    handles._released.clear()
    with pytest.raises(KvNotFound):
        handles.get(handle.id, "me")


def test_ended_handle_of_another_owner_is_unknown(tmp_path: Path) -> None:
    _, handles, handle = granted(tmp_path, Clock())
    handles.release(handle.id, "me")
    with pytest.raises(KvNotFound):
        handles.get(handle.id, "other")


def test_renewals_end_at_the_maximum_lifetime(tmp_path: Path) -> None:
    clock = Clock()
    _, _, handle = granted(tmp_path, clock)
    handle.start_lease()
    while clock.now < MAX_LIFETIME_SECONDS:
        left = handle.renew(SETTINGS.max_lease_seconds)
        assert 0 < left <= MAX_LIFETIME_SECONDS - clock.now
        clock.now += left - 1 if left > 1 else 1
    assert handle.renew(SETTINGS.max_lease_seconds) == 0

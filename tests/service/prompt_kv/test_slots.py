"""Slots and handles together against a model, with the accounts checked after every step."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from service.cluster.registry import new_replica_id
from service.config.prompt_kv import KvSettings
from service.errors import KvGone, KvNotFound
from service.kv.arena import PAGE_BYTES
from service.kv.handles.file_layout import LayoutFactory
from service.kv.handles.handle import MAX_LEASES, Handle
from service.kv.handles.table import Handles
from service.kv.store import GRACE_SECONDS, Slot, SlotState, SlotTable
from tests.fake_export import FORMAT
from tests.sample_sizes import num_examples

LAYOUTS = LayoutFactory("fake", FORMAT)
CAPACITY_BYTES = 40 * PAGE_BYTES
SETTINGS = KvSettings(max_lease_seconds=60.0)
MAX_LIFETIME_SECONDS = MAX_LEASES * SETTINGS.max_lease_seconds
REPLICA = new_replica_id()


class SlotMachine(RuleBasedStateMachine):
    """The model: holders and readers of every handle."""

    slots = Bundle("slots")
    handles = Bundle("handles")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        clock = self.clock
        self.table = SlotTable(CAPACITY_BYTES, clock=clock)
        self.handle_table = Handles(self.table, SETTINGS, replica_id=REPLICA, clock=clock)
        self.active: set[Handle] = set()
        self.pins: list[tuple[Handle, Any]] = []
        self.deadlines: dict[Handle, float] = {}

    def clock(self) -> float:
        return self.now

    @rule(target=slots, first=st.integers(0, 5), length=st.integers(1, 40))
    def reserve(self, first: int, length: int) -> Slot | None:
        layout = LAYOUTS.of(range(first, first + length), "v1")
        shared = self.table.find("me", layout.version, layout.tokens_sha256)
        if shared is not None:
            return shared
        slot = self.table.reserve("me", layout)
        assert slot is not None or self.table.free_bytes < CAPACITY_BYTES
        return slot

    @rule(target=handles, slot=slots, lease=st.integers(1, 90))
    def seal_and_grant(self, slot: Slot | None, lease: int) -> Handle | None:
        if slot is None or slot.state is SlotState.QUARANTINED:
            return None
        if slot.state is SlotState.RESERVED:
            self.table.seal(slot, "etag")
        handle = self.handle_table.grant("me", slot, float(lease))
        self.active.add(handle)
        return handle

    @rule(slot=slots)
    def discard(self, slot: Slot | None) -> None:
        if slot is not None and slot.state is SlotState.RESERVED:
            self.table.discard(slot, is_writable=True)
            assert self.table.num_bytes(SlotState.QUARANTINED) >= slot.extent.num_bytes
            self.table.allow_reuse(slot)

    @rule(handle=handles)
    def start_lease(self, handle: Handle | None) -> None:
        if handle is not None:
            handle.start_lease()

    @rule(handle=handles)
    def release(self, handle: Handle | None) -> None:
        if handle is not None:
            self.handle_table.release(handle.id, "me")
            self.active.discard(handle)

    @rule(handle=handles)
    def read(self, handle: Handle | None) -> None:
        if handle is None or handle not in self.active:
            return
        pin = self.handle_table.pinned(self.handle_table.get(handle.id, "me"))
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
        self.handle_table.sweep()
        self.active = {handle for handle in self.active if handle.is_active}

    @invariant()
    def accounts_are_consistent(self) -> None:
        self.table.check()
        self.handle_table.check()
        assert len(self.handle_table) == len(self.active)

    def record_deadlines(self) -> None:
        """A read lasts at most until the last known deadline of its handle."""
        for handle in self.active:
            if handle.is_active:
                self.deadlines[handle] = handle.deadline

    @invariant()
    def pinned_or_held_slots_are_not_free(self) -> None:
        read = [handle for handle, _ in self.pins if self.deadlines[handle] > self.now]
        for slot in {handle.slot for handle, _ in self.pins}:
            assert slot.pins == sum(handle.slot is slot for handle in read)
        for handle in read:
            assert handle.slot in self.table._slots
        for handle in self.active:
            assert handle.slot.state is SlotState.LEASED

    @invariant()
    def only_active_handles_are_found(self) -> None:
        for handle in self.active:
            assert self.handle_table.get(handle.id, "me") is handle
            with pytest.raises(KvNotFound):
                self.handle_table.get(handle.id, "you")

    def teardown(self) -> None:
        """All bytes are freed."""
        for _, pin in self.pins:
            pin.__exit__(None, None, None)
        for handle in self.active:
            self.handle_table.release(handle.id, "me")
        for slot in list(self.table._slots):
            if slot.state is SlotState.RESERVED:
                self.table.discard(slot)
            elif slot.state is SlotState.LEASED:
                assert not slot.num_handles
                self.table.discard(slot)
        self.now += GRACE_SECONDS
        self.table.sweep()
        assert self.table.free_bytes == CAPACITY_BYTES


SlotMachine.TestCase.settings = settings(
    max_examples=num_examples(60),
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
)
TestSlots = SlotMachine.TestCase


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def sealed(clock: Clock) -> tuple[SlotTable, Handles, Handle]:
    slots = SlotTable(CAPACITY_BYTES, clock=clock)
    handles = Handles(slots, SETTINGS, replica_id=REPLICA, clock=clock)
    slot = slots.reserve("me", LAYOUTS.of(range(9), "v1"))
    assert slot is not None
    slots.seal(slot, "etag")
    return slots, handles, handles.grant("me", slot, 30.0)


def test_bytes_stay_untouched_for_a_while_after_their_lease_expired() -> None:
    clock = Clock()
    slots, handles, handle = sealed(clock)
    handle.start_lease()
    clock.now = 30.0
    handles.sweep()
    with pytest.raises(KvGone):
        handles.get(handle.id, "me")
    assert slots.num_bytes(SlotState.QUARANTINED) == handle.slot.extent.num_bytes
    clock.now = 30.0 + GRACE_SECONDS
    slots.sweep()
    assert slots.free_bytes == CAPACITY_BYTES


def test_released_bytes_are_free_at_once() -> None:
    slots, handles, handle = sealed(Clock())
    handles.release(handle.id, "me")
    handles.release(handle.id, "me")
    assert slots.free_bytes == CAPACITY_BYTES


def test_download_keeps_the_bytes_until_the_lease_ends() -> None:
    clock = Clock()
    slots, handles, handle = sealed(clock)
    handle.start_lease()
    with handles.pinned(handle) as pin:
        clock.now = 29.0
        handles.release(handle.id, "me")
        pin.sweep()
        assert pin.is_open
        assert slots.free_bytes < CAPACITY_BYTES
        clock.now = 30.0
        pin.sweep()
        assert not pin.is_open
        assert slots.free_bytes == CAPACITY_BYTES
        slots.check()


def test_forgotten_handle_is_unknown() -> None:
    _, handles, handle = sealed(Clock())
    handles.release(handle.id, "me")
    handles._released.clear()
    with pytest.raises(KvNotFound):
        handles.get(handle.id, "me")


def test_ended_handle_of_another_owner_is_unknown() -> None:
    _, handles, handle = sealed(Clock())
    handles.release(handle.id, "me")
    with pytest.raises(KvNotFound):
        handles.get(handle.id, "other")


def test_renewals_end_at_the_maximum_lifetime() -> None:
    clock = Clock()
    _, _, handle = sealed(clock)
    handle.start_lease()
    while clock.now < MAX_LIFETIME_SECONDS:
        left = handle.renew(SETTINGS.max_lease_seconds)
        assert 0 < left <= MAX_LIFETIME_SECONDS - clock.now
        clock.now += left - 1 if left > 1 else 1
    assert handle.renew(SETTINGS.max_lease_seconds) == 0

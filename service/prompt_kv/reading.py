"""A download's pin on a slot, which ends with the lease at the latest."""

from collections.abc import Iterator
from contextlib import contextmanager

from service.prompt_kv.leases import Leases
from service.prompt_kv.slots import Slot, SlotTable


class Reading:
    """The slot's bytes stay as they are inside a `turn`, and between turns while the lease runs.

    A renewal counts. After a release the deadline of before counts: what is being sent is sent.
    """

    def __init__(self, slot: Slot, slots: SlotTable, leases: Leases, handle: str) -> None:
        self._slot = slot
        self._slots = slots
        self._leases = leases
        self._handle = handle
        self._deadline = leases.deadline(handle)
        self._in_turn = False
        self._is_open = True
        slots.pin(slot)

    @contextmanager
    def turn(self) -> Iterator[bool]:
        """False: the lease is over, and the bytes must not be read. To be kept short: the
        pin lasts for as long."""
        self.sweep()
        self._in_turn = self._is_open
        try:
            yield self._is_open
        finally:
            self._in_turn = False
            self.sweep()

    def sweep(self) -> None:
        """Ends the pin if the lease has ended and no turn is under way."""
        known = self._leases.deadline(self._handle)
        self._deadline = self._deadline if known is None else known
        if not self._in_turn and self._leases.is_past(self._deadline):
            self.close()

    def close(self) -> None:
        """Again changes nothing."""
        if self._is_open:
            self._is_open = False
            self._slots.unpin(self._slot)

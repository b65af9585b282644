"""Pin of a download on a slot, released when the lease ends at the latest."""

from collections.abc import Iterator
from contextlib import contextmanager

from service.prompt_kv.leases import Leases
from service.prompt_kv.slots import Slot, SlotTable


class DownloadPin:
    """Pin that keeps a slot's bytes unchanged inside a `turn`, and between turns under the lease.

    Renewals extend the pin. After a release the last deadline still applies, so a download in
    progress can complete.
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
        """Context manager around one read of the bytes.

        Yields False if the lease is over; the bytes must not be read then. Keep it short: the pin
        is not released inside a turn.
        """
        self.sweep()
        self._in_turn = self._is_open
        try:
            yield self._is_open
        finally:
            self._in_turn = False
            self.sweep()

    def sweep(self) -> None:
        """Release the pin if the lease has ended and no turn is in progress."""
        known = self._leases.deadline(self._handle)
        self._deadline = self._deadline if known is None else known
        if not self._in_turn and self._leases.is_past(self._deadline):
            self.close()

    def close(self) -> None:
        """Release the pin. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._slots.unpin(self._slot)

"""One group's way to a handle, and what several of them may wait for."""

import asyncio
from dataclasses import dataclass, field

from coppice.wire.kv import KvReason
from engine.kv_types import ExportSlot
from service.prompt_kv.handles import Handle
from service.prompt_kv.slots import Slot


@dataclass(slots=True, kw_only=True, eq=False)
class ExportRequest:
    """One group's. `export_slot` is what its first sample carries, if it is the one that writes.

    Once `ended` it has a handle or a reason.
    """

    owner: str
    lease_seconds: float
    export_slot: ExportSlot | None = None
    pending: "PendingWrite | None" = None
    handle: Handle | None = None
    reason: KvReason | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, kw_only=True, eq=False)
class PendingWrite:
    """A slot that is being written, and the exports that wait for it."""

    slot: Slot
    exports: list[ExportRequest] = field(default_factory=list)
    is_sealing: bool = False
    is_done: bool = False

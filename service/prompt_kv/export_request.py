"""One group's way to a handle, and what several of them may wait for."""

import asyncio
from dataclasses import dataclass, field

from coppice.wire.kv import KvReason
from engine.kv_types import ExportSlot
from service.prompt_kv.handles import Handle
from service.prompt_kv.slots import Slot


@dataclass(slots=True, kw_only=True, eq=False)
class Export:
    """One group's. `place` is what its first sample carries, if it is the one that writes.

    Once `ended` it has a handle or a reason.
    """

    owner: str
    lease_seconds: float
    place: ExportSlot | None = None
    pending: "Pending | None" = None
    handle: Handle | None = None
    reason: KvReason | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, kw_only=True, eq=False)
class Pending:
    """A slot that is being written, and the exports that wait for it."""

    slot: Slot
    exports: list[Export] = field(default_factory=list)
    sealing: bool = False
    over: bool = False

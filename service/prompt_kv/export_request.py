"""Records of the KV export: one request per group, one pending write per slot."""

import asyncio
from dataclasses import dataclass, field

from coppice.wire.kv import KvReason
from engine.kv_types import ExportSlot
from service.prompt_kv.handles import Handle
from service.prompt_kv.slots import Slot


@dataclass(slots=True, kw_only=True, eq=False)
class ExportRequest:
    """Export of one group's prompt.

    `export_slot` is attached to the group's first sample if this group writes the slot, otherwise
    it is None. Once `ended` is set, `handle` or `reason` is set.
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
    """A slot being written and the exports that wait for it."""

    slot: Slot
    exports: list[ExportRequest] = field(default_factory=list)
    is_sealing: bool = False
    is_done: bool = False

"""Entries of the span cache: KV that the engine has written or will write to its arena."""

import asyncio
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.kv_types import ExportSlot
from service.kv_reuse.prefix_order import Scope
from service.prompt_kv.arena import Extent


class CacheKey(NamedTuple):
    """Identity of a cached span: owner and salt, weights epoch, name, and digest of its tokens."""

    scope: Scope
    epoch: int
    name: str
    digest: bytes


@dataclass(slots=True, kw_only=True, eq=False)
class CacheEntry:
    """KV of one span in the arena; modified only by its cache.

    `ended` is set once `is_written` is final. The entry is not freed while it has `pins`.
    """

    slot: ExportSlot
    extent: Extent
    key: CacheKey
    pins: int = 0
    is_written: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

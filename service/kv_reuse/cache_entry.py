"""Keys and values that the engine wrote into the segments' arena, or is to write."""

import asyncio
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.kv_types import ExportSlot
from service.kv_reuse.prefix_order import Scope
from service.prompt_kv.allocator import Extent


class CacheKey(NamedTuple):
    """A segment of one key and salt under one activation; another text has another digest."""

    scope: Scope
    epoch: int
    name: str
    digest: bytes


@dataclass(slots=True, kw_only=True, eq=False)
class CacheEntry:
    """Changed by its store only.

    `ended` once it is `is_written` or never will be. It is not freed while `pins` are on it.
    """

    slot: ExportSlot
    extent: Extent
    key: CacheKey
    pins: int = 0
    is_written: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

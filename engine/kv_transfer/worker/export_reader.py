"""Exported KV, read directly from the arena by a worker.

Dimensions: L layers, H heads, T tokens, D head_dim.
"""

from pathlib import Path

import torch

from engine.kv_transfer.cache_spec import CacheLayout
from engine.kv_transfer.worker.arena import MappedArena
from engine.kv_types import ExportSlot


class Exports:
    """Owner of mapped arenas. Raises ArenaError for a slot outside its arena."""

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        self._arenas: dict[Path, MappedArena] = {}

    def tokens(self, place: ExportSlot, token_offset: int, num_tokens: int) -> torch.Tensor:
        """[L, 2, H, T, D] with all ranks' heads, over the arena itself."""
        layout = self._layout
        region = self._arena(place.arena).region(place.offset, layout.num_bytes(place.num_tokens))
        shape = (len(layout.layers), 2, layout.num_kv_heads, place.num_tokens, layout.head_dim)
        return region.view(layout.dtype).view(shape)[
            :, :, :, token_offset : token_offset + num_tokens
        ]

    def close(self) -> None:
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()

    def _arena(self, path: Path) -> MappedArena:
        if path not in self._arenas:
            self._arenas[path] = MappedArena(path)
        return self._arenas[path]

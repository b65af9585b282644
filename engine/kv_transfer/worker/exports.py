"""In a worker: exported keys and values, read where they lie.

L layers, H heads, T tokens, D head_dim.
"""

import torch

from engine.kv_transfer.cache_spec import CacheForm
from engine.kv_transfer.params import Place
from engine.kv_transfer.worker.arena import MappedArena


class Exports:
    """Owns its mappings of arenas. ArenaRefused where a place is none."""

    def __init__(self, form: CacheForm) -> None:
        self._form = form
        self._arenas: dict[str, MappedArena] = {}

    def tokens(self, place: Place, skip: int, num_tokens: int) -> torch.Tensor:
        """[L, 2, H, T, D] of all ranks' heads, over the arena itself."""
        form = self._form
        region = self._arena(place.arena).region(place.offset, form.num_bytes(place.num_tokens))
        shape = (len(form.layers), 2, form.num_kv_heads, place.num_tokens, form.head_dim)
        return region.view(form.dtype).view(shape)[:, :, :, skip : skip + num_tokens]

    def close(self) -> None:
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()

    def _arena(self, path: str) -> MappedArena:
        if path not in self._arenas:
            self._arenas[path] = MappedArena(path)
        return self._arenas[path]

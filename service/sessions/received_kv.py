"""KV of a session that another replica has sent, which the session's next call loads.

It is an entry of the span cache that is found only through its session. It is evicted like all
others, so the arena bounds it.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.kv_types import KvLoad, LoadPiece
from engine.protocol import Engine
from service.kv_reuse.span_cache import CacheEntry, SpanCache
from service.rollouts.prompt_kv_source import GroupMonitor, PrefilledPrompt
from service.sessions.segment import TokenArray, num_common


@dataclass(slots=True, eq=False)
class ReceivedKv:
    """KV of the full blocks of a conversation, `token_ids`, in the arena.

    The blocks into which it is loaded are private to a `chain` of requests. So all calls whose
    prompts begin with a block of the conversation are requests of this chain, from the first one
    that has loaded KV. The entry is released when a call has loaded all of it.
    """

    cache: SpanCache
    entry: CacheEntry
    token_ids: TokenArray
    block_size: int
    is_loaded: bool = False
    chain: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def is_current(self) -> bool:
        """True unless the weights have been updated since it was received."""
        return self.entry.key.epoch == self.cache.epoch

    def source(self, prompt: Sequence[int], num_samples: int) -> "ReceivedPrompt | None":
        """Source of a prompt that begins with a block of the conversation; None for others."""
        start = np.asarray(prompt[: len(self.token_ids)], np.int32)
        num_shared = min(num_common(start, self.token_ids), len(prompt) - 1)
        num_tokens = num_shared // self.block_size * self.block_size
        return ReceivedPrompt(self, num_tokens, num_samples) if num_tokens else None

    def release(self) -> None:
        """Free the memory, as soon as no call loads it."""
        self.cache.forget(self.entry)


class ReceivedPrompt(PrefilledPrompt):
    """Prompt source for the samples of one call, which load `num_tokens` of received KV.

    The entry is pinned while the call runs. If it was evicted, the prompt is prefilled.
    """

    def __init__(self, kv: ReceivedKv, num_tokens: int, num_samples: int) -> None:
        self._kv = kv
        self._num_tokens = num_tokens
        self._num_samples = num_samples
        self._is_pinned = False

    async def prepare(self, engine: Engine, monitor: GroupMonitor) -> KvLoad | None:
        return self.load()

    def load(self) -> KvLoad | None:
        """KV to load, or the chain that has loaded it; call `release` after the samples."""
        kv = self._kv
        if not kv.is_current:
            return None
        self._is_pinned = kv.cache.pin(kv.entry)
        if not (kv.is_loaded or self._is_pinned):
            return None
        return KvLoad(
            chain=kv.chain,
            num_requests=self._num_samples,
            exact_tokens=0,
            pieces=(self._piece(),) if self._is_pinned else (),
        )

    def _piece(self) -> LoadPiece:
        source = self._kv.entry.slot
        return LoadPiece(
            source=source, token_offset=0, num_tokens=self._num_tokens, start=0, shift=0
        )

    def release(self, *, settled: bool) -> None:
        kv = self._kv
        if not self._is_pinned:
            return
        self._is_pinned = False
        if settled:
            kv.is_loaded = True
            if self._num_tokens == len(kv.token_ids):
                kv.release()
        kv.cache.unpin(kv.entry, settled=settled)

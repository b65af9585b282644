"""Exports of KV that other replicas fetch during a move, with the prompt-KV arena and its handles.

A request whose tokens are in the prefix cache prefills the one after them, and exports them.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

from coppice.prompt_kv.host import read_boot_id
from coppice.wire.moves import MovedSpan
from engine.protocol import Engine
from engine.types import SampleRequest, Sampling
from service.prompt_kv.exports import Export
from service.prompt_kv.manager import PromptKvManager

PrefillReason = Literal[
    "disabled", "other_version", "too_small", "too_large", "no_room", "timeout", "failed"
]
"""Reason for which the receiver of a move prefills tokens instead of loading their KV."""
SessionKvOutcome = Literal["received", PrefillReason]
"""`received`, or the reason for which the next call of a moved session is prefilled."""
PREFILL_ONLY = Sampling(max_tokens=1, temperature=0.0)
LEASE_SECONDS = 60.0
MAX_TIME_SHARE = 0.5
"""Share of the time for moves in which KV is exported; the rest is for the receiver."""
_OWNER = "moves/"


class KvUnavailable(Exception):
    """Something is moved without its KV."""

    def __init__(self, reason: PrefillReason) -> None:
        super().__init__(reason)
        self.reason: PrefillReason = reason


def owner_of(resource_id: str) -> str:
    """Owner of the handles of the KV of a moved rollout or session; no API key has this name."""
    return f"{_OWNER}{resource_id}"


class MoveExports:
    """Exports of KV for other replicas. The caller releases each export that it begins.

    `bytes_per_second` is the assumed rate at which KV is copied to another replica; 0: none is.
    """

    def __init__(
        self, engine: Engine, prompt_kv: PromptKvManager, *, bytes_per_second: float
    ) -> None:
        self._engine = engine
        self._prompt_kv = prompt_kv
        self._bytes_per_second = bytes_per_second
        self.boot_id = read_boot_id()

    @property
    def arena(self) -> Path:
        assert self._prompt_kv.arena is not None, "KV was exported to it"
        return self._prompt_kv.arena.path

    def check_enabled(self) -> None:
        """Raise KvUnavailable if no KV is moved."""
        kv_format = self._engine.info.kv_format
        if not self._bytes_per_second or self._prompt_kv.reason is not None:
            raise KvUnavailable("disabled")
        if kv_format is None or kv_format.layers:
            raise KvUnavailable("disabled")

    def estimated_seconds(self, num_tokens: int) -> float:
        """Estimate of the time to copy the KV of tokens. Raises KvUnavailable if there are none."""
        if not num_tokens:
            raise KvUnavailable("too_small")
        return num_tokens * self._engine.info.kv_bytes_per_token / self._bytes_per_second

    def begin(
        self, owner: str, token_ids: Sequence[int], begun: list[Export], first_token: int = 0
    ) -> Export:
        """Begin an export of all tokens but the last one, and add it to those that were begun."""
        export = self._prompt_kv.begin(owner, token_ids, LEASE_SECONDS, first_token)
        begun.append(export)
        if export.ended.is_set() and export.handle is None:
            raise KvUnavailable("no_room")
        return export

    async def write(self, requests: Sequence[SampleRequest], exports: Collection[Export]) -> bool:
        """Have the engine run the requests of exports; True if all have ended by themselves.

        Exports that others write, or have written, have no request.
        """
        finishes = list[str]()
        try:
            for completion in await self._engine.submit(requests) if requests else ():
                finishes.append((await completion).finish)
        finally:
            await self._engine.abort([request.id for request in requests])
        for export in exports:
            if export.is_writer:
                await self._prompt_kv.finish(export)
        for export in exports:
            await export.ended.wait()
        return all(finish in ("stop", "length") for finish in finishes)

    def moved_span(self, export: Export, start: int) -> MovedSpan:
        """Part of a move that names a written export; starts the lease of its handle."""
        handle = export.handle
        if handle is None:
            raise KvUnavailable("failed")
        handle.start_lease()
        return MovedSpan.model_construct(
            handle=handle.id,
            start=start,
            num_tokens=handle.slot.layout.num_tokens,
            num_bytes=handle.slot.layout.file_bytes,
            offset=handle.slot.file_offset,
        )

    def release(self, exports: Collection[Export]) -> None:
        for export in exports:
            if export.handle is not None:
                self._prompt_kv.handles.end(export.handle)
            else:
                self._prompt_kv.abandon(export)

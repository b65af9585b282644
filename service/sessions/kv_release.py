"""Queue of ended agent sessions whose retained KV the engine releases in batches."""

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from engine.errors import EngineDead

Release = Callable[[Sequence[str]], Awaitable[None]]
Track = Callable[[Coroutine[Any, Any, None]], None]


MAX_WAITING = 2**16
"""Maximum number of sessions whose release is repeated; the KV of older ones expires."""


class KvReleaseQueue:
    """Sessions that make no further calls, whose KV is released in batches. Never blocks.

    `track` runs a coroutine in the background. One call of the engine is in progress at a time, so
    thousands of sessions that end together take few calls. After a failed call, its sessions are
    released with the next session that ends. The sessions of an engine that has died have no KV.
    """

    def __init__(self, release: Release, *, track: Track) -> None:
        self._release = release
        self._track = track
        self._session_ids: dict[str, None] = {}
        self._is_sending = False

    def add(self, session_id: str) -> None:
        self._session_ids[session_id] = None
        if not self._is_sending:
            self._is_sending = True
            self._track(self._send())

    async def _send(self) -> None:
        try:
            while batch := list(self._session_ids)[-MAX_WAITING:]:
                self._session_ids = dict.fromkeys(batch)
                with suppress(EngineDead):
                    await self._release(batch)
                for session_id in batch:
                    del self._session_ids[session_id]
        finally:
            self._is_sending = False

"""Release of the KV that the engine retains for agent sessions."""

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from engine.errors import EngineDead

Release = Callable[[Sequence[str]], Awaitable[None]]
Track = Callable[[Coroutine[Any, Any, None]], None]


class KvReleaseQueue:
    """Sessions that make no further calls, whose KV is released in batches. Never blocks.

    `track` runs a coroutine in the background. One call of the engine is in progress at a time, so
    thousands of sessions that end together take few calls. The sessions of an engine that has died
    have no KV.
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
            with suppress(EngineDead):
                while self._session_ids:
                    batch, self._session_ids = list(self._session_ids), {}
                    await self._release(batch)
        finally:
            self._is_sending = False

"""KV of moved sessions, fetched from the replica that has sent them, and kept for their next calls.

As the KV of moved samples, it is copied to the arena of the span cache and checked: its header must
be the one that this replica would write for the tokens of the session and the active weights.
Sessions whose KV is not received in time are prefilled.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from coppice.wire.session_moves import MovedSessionKv, MovedSessions
from engine.errors import EngineError
from engine.protocol import Engine
from service.kv_reuse.prompt_sections import Scope
from service.kv_reuse.span_cache import CacheEntry, EntryKey, SpanCache
from service.moves.exports import KvUnavailable, SessionKvOutcome
from service.moves.kv_files import Deadline, EntryReader, FetchFailed, KvSources
from service.moves.session_kv_export import FETCH_SECONDS, OnSessionKv
from service.moves.session_state import conversation
from service.sessions.received_kv import ReceivedKv
from service.sessions.segment import TokenArray
from service.sessions.session import Session

NUM_THREADS = 2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SessionKvCopy:
    """Copy of the KV of a session's tokens, of one weights version, in an entry of the cache."""

    session_id: str
    source: str
    kv: MovedSessionKv
    token_ids: TokenArray
    version: str
    entry: CacheEntry


class SessionKvImporter:
    """Fetches the KV of moved sessions, in threads. Few have reserved memory at the same time.

    `version` is the active weights version, and None while weights are being activated.
    `on_ended` is called for each session with KV. `close` it before the cache.
    """

    def __init__(
        self,
        engine: Engine,
        cache: SpanCache,
        sources: KvSources,
        *,
        version: Callable[[], str | None],
        on_ended: OnSessionKv,
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._sources = sources
        self._version = version
        self._on_ended = on_ended
        self._reader = EntryReader(engine, cache)
        self._turns = asyncio.Semaphore(NUM_THREADS)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="session-kv")

    async def close(self) -> None:
        await asyncio.to_thread(self._threads.shutdown)

    async def fetch(self, state: MovedSessions, sessions: Sequence[Session]) -> None:
        """Set `received_kv` of sessions whose KV can be fetched, in at most FETCH_SECONDS."""
        until = time.monotonic() + FETCH_SECONDS
        for session, moved in zip(sessions, state.sessions, strict=True):
            if moved.kv is not None and session.can_continue:
                seconds = min(moved.kv.seconds, until - time.monotonic())
                outcome = await self._try_to_fetch(state.source, session, moved.kv, seconds)
                self._on_ended(outcome)

    async def _try_to_fetch(
        self, source: str, session: Session, kv: MovedSessionKv, seconds: float
    ) -> SessionKvOutcome:
        try:
            deadline = Deadline(seconds)
            async with asyncio.timeout(seconds), self._turns:
                copy = await self._reserve(source, session, kv)
                await self._fill(copy, deadline)
        except KvUnavailable as error:
            return error.reason
        except TimeoutError:
            return "timeout"
        except FetchFailed as error:
            log.warning("the KV of a moved session was not fetched: %s", error)
            return "failed"
        except EngineError as error:
            log.warning("the KV of a moved session was not fetched: %s", type(error).__name__)
            return "failed"
        except Exception:
            log.exception("the fetch of a moved session's KV failed")
            return "failed"
        block_size = self._engine.info.block_size
        session.received_kv = ReceivedKv(self._cache, copy.entry, copy.token_ids, block_size)
        self._cache.add_written(copy.entry)
        return "received"

    async def _reserve(self, source: str, session: Session, kv: MovedSessionKv) -> SessionKvCopy:
        """Reserve memory for the KV of full blocks, after which a token of the session is left.

        Raises KvUnavailable or FetchFailed.
        """
        has_other_kv = session.options.keep_kv is not None or session.options.adapter is not None
        if self._cache.reason is not None or has_other_kv:
            raise KvUnavailable("disabled")
        token_ids = await asyncio.to_thread(self._tokens, session, kv)
        if (version := self._version()) is None:
            raise KvUnavailable("other_version")
        scope = Scope(session.owner, session.cache_salt)
        key = EntryKey(scope, self._cache.epoch, "", session.id.encode())
        if (entry := self._cache.reserve(len(token_ids), key)) is None:
            raise KvUnavailable("no_room")
        return SessionKvCopy(session.id, source, kv, token_ids, version, entry)

    def _tokens(self, session: Session, kv: MovedSessionKv) -> TokenArray:
        tokens, num_tokens = conversation(session, kv.segment), kv.file.num_tokens
        is_whole = num_tokens and num_tokens % self._engine.info.block_size == 0
        if kv.file.start or not is_whole or num_tokens >= len(tokens):
            raise FetchFailed("it does not fit the session")
        return np.asarray(tokens[:num_tokens], np.int32)

    async def _fill(self, copy: SessionKvCopy, deadline: Deadline) -> None:
        """Copy a file in a thread, which ends by itself, and make it loadable.

        The engine forgets it at an activation that begins later.
        """
        entry = copy.entry
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._read, copy, deadline)
        try:
            await asyncio.shield(work)
            await self._engine.add_exported_kv([entry.slot.name or ""])
            if self._version() != copy.version or self._cache.epoch != entry.key.epoch:
                raise KvUnavailable("other_version")
        except BaseException:
            deadline.end()
            work.add_done_callback(lambda work: self._discard(entry, work))
            raise

    def _discard(self, entry: CacheEntry, work: asyncio.Future[None]) -> None:
        """Free an entry that no thread writes any more."""
        if not work.cancelled():
            work.exception()  # marks it as retrieved
        self._cache.unpin(entry, settled=True)

    def _read(self, copy: SessionKvCopy, deadline: Deadline) -> None:
        kv, path = copy.kv, f"/v1/moves/{copy.session_id}/kv"
        files = self._sources.open(copy.source, kv.boot_id, kv.arena, path)
        tokens = copy.token_ids.tolist()
        try:
            self._reader.read(files, kv.file, copy.entry, tokens, copy.version, deadline)
        finally:
            files.close()

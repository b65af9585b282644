"""Export of the KV of idle sessions, which the receiver of a move keeps for their next calls.

A request of the session finds the blocks of its last conversation, or prefills those that were
evicted, and exports them. The exports of a drain run one after the other, and take a share of
`cluster.move_seconds` together.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from coppice.wire.session_moves import MovedSessionKv
from engine.errors import EngineError
from engine.kv_types import ExportSlot, KvLoad
from engine.protocol import Engine
from engine.types import EngineInfo, SampleRequest
from service.moves.exports import (
    MAX_TIME_SHARE,
    PREFILL_ONLY,
    KvUnavailable,
    MoveExports,
    PrefillReason,
    SessionKvOutcome,
    owner_of,
)
from service.moves.session_state import conversation
from service.prompt_kv.exports import Export
from service.rollouts.fairness import PriorityAging
from service.sessions.session import Session

OnSessionKv = Callable[[SessionKvOutcome], None]
"""Receives what happened to the KV of a moved session."""
FETCH_SECONDS = 5.0

log = logging.getLogger(__name__)


class SessionKvExporter:
    """Exports the last conversation of sessions that are moved.

    `move_seconds` is the time for all moves, of which all exports together get a share.
    `on_prefilled` is called for a session that is moved without its KV.
    """

    def __init__(
        self,
        engine: Engine,
        exports: MoveExports,
        priority_aging: PriorityAging,
        *,
        move_seconds: float,
        on_prefilled: OnSessionKv,
    ) -> None:
        self._engine = engine
        self._exports = exports
        self._priority_aging = priority_aging
        self._seconds_left = MAX_TIME_SHARE * move_seconds
        self._on_prefilled = on_prefilled
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def exported(
        self, sessions: Sequence[Session]
    ) -> AsyncIterator[dict[str, MovedSessionKv]]:
        """Context manager in which other replicas can fetch the KV of sessions, by their ids."""
        begun, found = list[Export](), dict[str, MovedSessionKv]()
        try:
            for session in sessions:
                if session.can_continue and session.turns:
                    kv = await self._try_to_export(session, begun)
                    found |= {} if kv is None else {session.id: kv}
            yield found
        finally:
            self._exports.release(begun)

    async def _try_to_export(self, session: Session, begun: list[Export]) -> MovedSessionKv | None:
        """Export the KV of a session, which is moved without it after any error."""
        reason: PrefillReason = "failed"
        try:
            return await self._export(session, begun)
        except KvUnavailable as error:
            reason = error.reason
        except TimeoutError:
            reason = "timeout"
        except EngineError as error:
            log.warning("the KV of a moved session was not exported: %s", type(error).__name__)
        except Exception:
            log.exception("the export of a moved session's KV failed")
        self._on_prefilled(reason)
        return None

    async def _export(self, session: Session, begun: list[Export]) -> MovedSessionKv:
        self._exports.check_enabled()
        if session.options.keep_kv is not None or session.options.adapter is not None:
            raise KvUnavailable("disabled")
        segment = session.turns[-1].segment
        tokens = await asyncio.to_thread(conversation, session, segment)
        end = _exported_tokens(len(tokens), self._engine.info)
        seconds = self._exports.estimated_seconds(end)
        async with self._turn:
            if seconds > self._seconds_left:
                raise KvUnavailable("too_large")
            with self._spending():
                async with asyncio.timeout(self._seconds_left):
                    export = await self._write(session, tokens[: end + 1], begun)
        return MovedSessionKv.model_construct(
            segment=segment,
            boot_id=self._exports.boot_id,
            arena=str(self._exports.arena),
            seconds=FETCH_SECONDS,
            file=self._exports.moved_span(export, 0),
        )

    @contextmanager
    def _spending(self) -> Iterator[None]:
        """Context manager whose duration is subtracted from the time for exports."""
        started_at = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            self._seconds_left -= asyncio.get_running_loop().time() - started_at

    async def _write(self, session: Session, tokens: list[int], begun: list[Export]) -> Export:
        """Have the engine write an export, unless one of a previous offer is still there."""
        export = self._exports.begin(owner_of(session.id), tokens, begun)
        if export.export_slot is None:
            await self._exports.write([], [export])
            return export
        source, is_settled = session.kv_source(tokens, 1), False
        try:
            load = None if source is None else source.load()
            priority = self._priority_aging.to_engine_priority(session.options.priority)
            request = _request(session, tokens, priority, export.export_slot, load)
            is_settled = await self._exports.write([request], [export])
        finally:
            if source is not None:
                source.release(settled=is_settled)
        return export


def _exported_tokens(num_tokens: int, info: EngineInfo) -> int:
    """Length of the full blocks of a conversation that one more token of a prompt can follow."""
    longest_prompt = min(num_tokens, info.max_context_tokens - 1)
    return max(longest_prompt - 1, 0) // info.block_size * info.block_size


def _request(
    session: Session, tokens: list[int], priority: int, slot: ExportSlot, load: KvLoad | None
) -> SampleRequest:
    """Request that prefills the last token, and exports the others."""
    return SampleRequest(
        id=uuid.uuid4().hex,
        prompt_token_ids=tokens,
        sampling=PREFILL_ONLY,
        priority=priority,
        cache_salt=session.cache_salt,
        session_id=session.id,
        speculation=False,
        load=load,
        export=slot,
    )

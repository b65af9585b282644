"""Sessions of this replica: the open ones, and ended ones until they are dropped."""

import asyncio
import time
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

from coppice.wire.sessions import SessionsEndRecord, SessionsFinish, SessionsProgressRecord
from service.http.errors import Overloaded, SessionNotFound
from service.rollouts.idempotency import IdempotencyClaim
from service.sessions.session import Session

PROGRESS_SECONDS = 15.0
RETRY_SECONDS = 2.0

StreamItem = Session | SessionsProgressRecord | SessionsEndRecord


@dataclass(slots=True, eq=False)
class EndedSessions:
    """Ended sessions of one API key or group, in the order of their sequence.

    `changed` is set at the next end. So an end wakes only the streams that send the session.
    """

    sessions: list[Session] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, session: Session) -> None:
        self.sessions.append(session)
        self.notify()

    def notify(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def after(self, sequence: int) -> list[Session]:
        return self.sessions[bisect_right(self.sessions, sequence, key=_sequence) :]


@dataclass(slots=True, kw_only=True, eq=False)
class SessionGroup:
    """The sessions of one request. `num_kept` counts those that are open or cached."""

    id: str
    owner: str
    session_ids: list[str]
    finish: SessionsFinish
    deadline: float | None
    claim: IdempotencyClaim | None
    num_open: int
    num_kept: int
    num_finished: int = 0
    ended: EndedSessions = field(default_factory=EndedSessions)


class SessionStore:
    """Sessions and their groups, with the memory that they take. Runs on one event loop.

    Ended sessions are dropped after `keep_seconds`. If all sessions take more than `max_bytes`, the
    oldest ended ones are dropped earlier; `on_drop` is called for each of these. Sequences begin at
    the time of the start in microseconds, so that a client that has read sequences of an earlier
    process misses no session.
    """

    def __init__(
        self,
        *,
        keep_seconds: float,
        max_bytes: int,
        on_drop: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keep_seconds = keep_seconds
        self._max_bytes = max_bytes
        self._on_drop = on_drop
        self._clock = clock
        self._open: dict[str, Session] = {}
        self._ended: OrderedDict[str, tuple[float, Session]] = OrderedDict()
        self._ended_of: defaultdict[str, EndedSessions] = defaultdict(EndedSessions)
        self._groups: dict[tuple[str, str], SessionGroup] = {}
        self._sizes: dict[str, int] = {}
        self._last_sequence = time.time_ns() // 1000
        self._idle = asyncio.Event()
        self._is_closed = False
        self.num_bytes = 0

    @property
    def num_open(self) -> int:
        return len(self._open)

    def num_open_of(self, owner: str) -> int:
        return sum(session.owner == owner for session in self._open.values())

    def open_sessions(self) -> list[Session]:
        """Sessions that are open, or whose last calls are being aborted."""
        return list(self._open.values())

    def groups(self) -> list[SessionGroup]:
        return list(self._groups.values())

    def sessions_of(self, group: SessionGroup) -> Iterator[Session]:
        """Open sessions of a group."""
        found = (self._open.get(session_id) for session_id in group.session_ids)
        return (session for session in found if session is not None)

    def add(self, group: SessionGroup, sessions: list[Session]) -> None:
        self._groups[group.owner, group.id] = group
        for session in sessions:
            self._open[session.id] = session
            self.measure(session)

    def find(self, session_id: str) -> Session | None:
        ended = self._ended.get(session_id)
        return self._open.get(session_id) if ended is None else ended[1]

    def find_group(self, owner: str, group_id: str) -> SessionGroup | None:
        return self._groups.get((owner, group_id))

    def group(self, owner: str, group_id: str) -> SessionGroup:
        group = self.find_group(owner, group_id)
        if group is None:
            raise SessionNotFound("no group of this id has open or cached sessions")
        return group

    def end(self, session: Session) -> SessionGroup:
        """Keep a session that has ended and whose calls are recorded; returns its group."""
        self._last_sequence += 1
        session.sequence = self._last_sequence
        del self._open[session.id]
        self._ended[session.id] = (self._clock(), session)
        group = self._groups[session.owner, session.group_id]
        group.num_open -= 1
        session.ended.set()
        group.ended.add(session)
        self._ended_of[session.owner].add(session)
        if not self._open:
            self._idle.set()
        return group

    def check_memory(self) -> None:
        """Refuse calls and new sessions if the open sessions alone take all memory."""
        self._drop_above_limit()
        if self.num_bytes > self._max_bytes:
            raise Overloaded(
                "the sessions take all memory that they may have (sessions.max_bytes)",
                retry_after_seconds=RETRY_SECONDS,
            )

    def measure(self, session: Session) -> None:
        """Update the memory of all sessions, and drop the oldest ended ones above the limit.

        A session that was dropped takes none.
        """
        if self.find(session.id) is None:
            return
        size = session.num_bytes
        self.num_bytes += size - self._sizes.get(session.id, 0)
        self._sizes[session.id] = size
        self._drop_above_limit()

    def _drop_above_limit(self) -> None:
        while self.num_bytes > self._max_bytes and self._ended:
            self._on_drop()
            self._drop_oldest()

    def drop_expired(self) -> None:
        expired = self._clock() - self._keep_seconds
        while self._ended:
            ended_at, _ = next(iter(self._ended.values()))
            if ended_at > expired:
                return
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        session_id, (_, session) = self._ended.popitem(last=False)
        self.num_bytes -= self._sizes.pop(session_id)
        group = self._groups[session.owner, session.group_id]
        for ended in (group.ended, self._ended_of[session.owner]):
            del ended.sessions[0]  # the oldest of all is the oldest of its group and key
        group.num_kept -= 1
        if not group.num_kept:
            del self._groups[session.owner, session.group_id]

    async def wait_until_ended(self) -> None:
        """Wait until no session is open."""
        while self._open:
            self._idle.clear()
            await self._idle.wait()

    def close(self) -> None:
        """End all streams once they have sent the sessions that have ended."""
        self._is_closed = True
        for ended in (*self._ended_of.values(), *(group.ended for group in self.groups())):
            ended.notify()

    async def stream(
        self, owner: str, group: SessionGroup | None, after: int
    ) -> AsyncIterator[StreamItem]:
        """Ended sessions of `owner` in the order of their sequence; progress while none ends.

        The stream of a group ends with it. Others end when the server stops.
        """
        ended = self._ended_of[owner] if group is None else group.ended
        while True:
            changed = ended.changed
            for session in ended.after(after):
                yield session
                after = _sequence(session)
            if changed.is_set():
                continue
            if group is not None and not group.num_open:
                yield _end_record(group)
                return
            if self._is_closed:
                return
            try:
                async with asyncio.timeout(PROGRESS_SECONDS):
                    await changed.wait()
            except TimeoutError:
                num_open = self.num_open_of(owner) if group is None else group.num_open
                yield SessionsProgressRecord(num_open=num_open)


def _sequence(session: Session) -> int:
    assert session.sequence is not None, "the session has ended"
    return session.sequence


def _end_record(group: SessionGroup) -> SessionsEndRecord:
    return SessionsEndRecord(
        num_sessions=len(group.session_ids),
        num_finished=group.num_finished,
        num_dropped=len(group.session_ids) - group.num_kept,
    )

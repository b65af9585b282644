"""Store of this replica's agent sessions, open or ended, with a limit on their memory."""

import asyncio
import time
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager

from coppice.wire.sessions import SessionsEndRecord, SessionsProgressRecord
from service.cluster.idempotency_claim import move_key
from service.cluster.registry import Replica
from service.errors import Overloaded, RedirectToReplica, SessionNotFound
from service.sessions.session import Session
from service.sessions.session_group import (
    EndedSessions,
    SessionGroup,
    end_record,
    sequence_of,
)

PROGRESS_SECONDS = 15.0
RETRY_SECONDS = 2.0

StreamItem = Session | SessionsProgressRecord | SessionsEndRecord


class SessionStore:
    """Sessions and their groups, with the memory that they take. Runs on one event loop.

    Ended sessions are dropped after `keep_seconds`. If all sessions take more than `max_bytes`, the
    oldest ended ones are dropped earlier; `on_drop` is called for each of these. `release` releases
    the cluster key of a session or group that another replica has moved here. Sequences begin at
    the time of the start in microseconds, so that a client that has read sequences of an earlier
    process misses no session.
    """

    def __init__(
        self,
        *,
        keep_seconds: float,
        max_bytes: int,
        on_drop: Callable[[], None],
        release: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._release = release
        self._moved: dict[str, str] = {}
        self._keys: dict[str, str] = {}
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
    def last_sequence(self) -> int:
        return self._last_sequence

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

    def is_of_another_group(self, session_id: str, owner: str, group_id: str) -> bool:
        session = self.find(session_id)
        return session is not None and (session.owner, session.group_id) != (owner, group_id)

    def find_group(self, owner: str, group_id: str) -> SessionGroup | None:
        return self._groups.get((owner, group_id))

    def group(self, owner: str, group_id: str) -> SessionGroup:
        """Find a group; raises RedirectToReplica if it was moved."""
        group = self.find_group(owner, group_id)
        if group is None:
            raise SessionNotFound("no group of this id has open or cached sessions")
        if group.moved_to is not None:
            raise RedirectToReplica(group.moved_to.url)
        return group

    def group_of(self, session: Session) -> SessionGroup:
        return self._groups[session.owner, session.group_id]

    def end(self, session: Session) -> None:
        """Keep a session that has ended and whose calls are recorded.

        If its group was moved, it is sent to the same replica, which gives it a sequence.
        """
        group = self.group_of(session)
        group.num_open -= 1
        session.ended.set()
        if group.moved_to is None and not group.is_offered:
            self._close(session, group)

    @contextmanager
    def offering(self, group: SessionGroup) -> Iterator[None]:
        """Context manager around an offer of a group to other replicas.

        Sessions that end meanwhile get a sequence here only if no replica accepts the group: the
        replica that accepts it waits for them.
        """
        group.is_offered = True
        try:
            yield
        finally:
            group.is_offered = False
            if group.moved_to is None:
                for session in list(self.sessions_of(group)):
                    if session.ended.is_set():
                        self._close(session, group)

    def _close(self, session: Session, group: SessionGroup) -> None:
        del self._open[session.id]
        self._add_ended(session, group)
        self._notify_idle()

    def _add_ended(self, session: Session, group: SessionGroup) -> None:
        self._last_sequence += 1
        session.sequence = self._last_sequence
        self._ended[session.id] = (self._clock(), session)
        group.ended.add(session)
        self._ended_of[session.owner].add(session)

    def _notify_idle(self) -> None:
        if not self._open:
            self._idle.set()

    def key_of(self, session_id: str) -> str | None:
        """Key of a session that another replica created."""
        return self._keys.get(session_id)

    def check_here(self, session_id: str) -> None:
        """Raise RedirectToReplica if the session was moved to another replica."""
        if session_id in self._moved:
            raise RedirectToReplica(self._moved[session_id])

    def on_moved(self, group: SessionGroup, sessions: Sequence[Session], replica: Replica) -> None:
        """Redirect requests for the open ones of the sessions, and for their group, to a replica.

        Those that ended before are also kept here, for the streams without a group.
        """
        if group.moved_to is None:
            group.moved_to = replica
            group.ended.notify()
        for session in sessions:
            if self._open.pop(session.id, None) is not None:
                self._moved[session.id] = replica.url
                self.num_bytes -= self._sizes.pop(session.id)
        self._notify_idle()

    def receive(
        self, group: SessionGroup, sessions: Sequence[Session], *, last_sequence: int
    ) -> None:
        """Add sessions that another replica has sent, to a group that may be new.

        Its later sequences are higher than all that readers have received from the sender.
        """
        self._groups[group.owner, group.id] = group
        self._keys |= group.keys
        self._last_sequence = max(self._last_sequence, last_sequence)
        for session in sessions:
            group.remaining_ids.discard(session.id)
            self._moved.pop(session.id, None)
            self._receive(group, session)
            self.measure(session)

    def _receive(self, group: SessionGroup, session: Session) -> None:
        if session.is_open:
            self._open[session.id] = session
            return
        session.ended.set()
        if session.sequence is not None:  # it ended before its group was moved
            self._ended[session.id] = (self._clock(), session)
            group.ended.add(session)
            return
        group.num_open -= 1
        group.num_finished += session.state == "finished"
        self._add_ended(session, group)

    def received(self, group: SessionGroup) -> list[Session]:
        """All sessions of a group that are here."""
        return [*self.sessions_of(group), *group.ended.sessions]

    def return_to_source(self, group: SessionGroup, sessions: Sequence[Session]) -> None:
        """Remove received sessions, which their sender continues."""
        is_whole = len(sessions) + len(group.remaining_ids) == group.num_kept
        for session in sessions:
            self._remove(session, group)
            group.remaining_ids.add(session.id)
        if is_whole:
            self._drop_group(group)
            group.ended.notify()
        self._notify_idle()

    def _remove(self, session: Session, group: SessionGroup) -> None:
        session.is_returned = True
        session.ended.set()
        self.num_bytes -= self._sizes.pop(session.id, 0)
        group.num_finished -= session.state == "finished"
        if self._open.pop(session.id, None) is None:
            del self._ended[session.id]
            group.num_open += 1
            for ended in (group.ended, self._ended_of[group.owner]):
                ended.sessions = [each for each in ended.sessions if each is not session]
        self._release(move_key(session.id))

    def drop_remaining(self, group: SessionGroup) -> None:
        """Do not wait for the sessions that the source of a group has not sent."""
        group.num_open -= len(group.remaining_ids)
        group.num_kept -= len(group.remaining_ids)
        group.remaining_ids.clear()
        group.ended.notify()
        if not group.num_kept:
            self._drop_group(group)

    def check_memory(self, num_new_bytes: int = 0) -> None:
        """Refuse calls and new sessions if the open sessions alone take all memory.

        Then no ended session is dropped.
        """
        if self.num_bytes + num_new_bytes <= self._max_bytes:
            return
        num_open_bytes = sum(self._sizes[session_id] for session_id in self._open)
        if num_open_bytes + num_new_bytes > self._max_bytes:
            raise Overloaded(
                "the sessions take all memory that they may have (sessions.max_bytes)",
                retry_after_seconds=RETRY_SECONDS,
            )
        self._drop_above_limit(num_new_bytes)

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

    def _drop_above_limit(self, num_new_bytes: int = 0) -> None:
        while self.num_bytes + num_new_bytes > self._max_bytes and self._ended:
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
        self._release(move_key(session_id))
        group = self.group_of(session)
        for ended in (group.ended, self._ended_of[session.owner]):
            if ended.sessions[:1] == [session]:  # the oldest of all is the oldest of its group
                del ended.sessions[0]
        group.num_kept -= 1
        if not group.num_kept:
            self._drop_group(group)

    def _is_returned(self, group: SessionGroup) -> bool:
        """True if the sender of a group continues it."""
        return self._groups.get((group.owner, group.id)) is not group

    def _drop_group(self, group: SessionGroup) -> None:
        del self._groups[group.owner, group.id]
        self._release(move_key(group.id, group.owner))
        for session_id in group.keys:
            self._keys.pop(session_id, None)

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
                after = sequence_of(session)
            if changed.is_set():
                continue
            if group is not None and group.moved_to is not None:
                return
            if group is not None and not group.num_open:
                yield end_record(group)
                return
            if self._is_closed or (group is not None and self._is_returned(group)):
                return
            try:
                async with asyncio.timeout(PROGRESS_SECONDS):
                    await changed.wait()
            except TimeoutError:
                num_open = self.num_open_of(owner) if group is None else group.num_open
                yield SessionsProgressRecord(num_open=num_open)

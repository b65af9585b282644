"""A worker thread with fair queueing between API keys, and between the sessions of a key."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from service.http.errors import Overloaded, QuotaExceeded
from service.observability.logs import key_name

Result = TypeVar("Result")

RETRY_SECONDS = 2.0
SESSION_SHARE = 4
"""The part of a key's limit that one of its agent sessions may have, as a divisor."""
AGENTS_SHARE = 2
"""The part of the limit over all keys that the agent sessions of all keys may have, as a divisor.

So agents, which a trainer starts by the thousands, leave room for the requests of the keys.
"""


class QueueName(NamedTuple):
    """The API key of queued work, and the agent session for requests of an agent."""

    key: str
    session: str = ""

    @classmethod
    def of_caller(cls, kind: str) -> "QueueName":
        """Queue of the current request's caller, for one kind of work."""
        key, _, session = (key_name.get() or "").partition("/")
        return cls(f"{kind} of {key}", session)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Maximum queued work of a `FairExecutor` in bytes, per API key and over all keys.

    The work of a key includes that of its agent sessions. One session may have a quarter of it,
    and the sessions of all keys half of the total.
    """

    key_bytes: int
    total_bytes: int


@dataclass(slots=True, eq=False)
class _Job:
    function: Callable[[], Any]
    num_bytes: int
    is_of_agent: bool
    done: asyncio.Future[Any]


@dataclass(slots=True, eq=False)
class _KeyQueue:
    """Queued work of one API key: round robin between its sessions, FIFO within each."""

    sessions: dict[str, deque[_Job]] = field(default_factory=dict)
    num_bytes: int = 0

    def session_bytes(self, session: str) -> int:
        return sum(job.num_bytes for job in self.sessions.get(session, ()))

    def append(self, session: str, job: _Job) -> None:
        self.sessions.setdefault(session, deque()).append(job)
        self.num_bytes += job.num_bytes

    def take(self) -> _Job:
        """Remove and return the first job of the next session."""
        session = next(iter(self.sessions))
        jobs = self.sessions.pop(session)
        job = jobs.popleft()
        self.num_bytes -= job.num_bytes
        if jobs:
            self.sessions[session] = jobs
        return job

    def drop(self, session: str, job: _Job) -> bool:
        """Remove a job; False if it has been started."""
        jobs = self.sessions.get(session)
        if jobs is None or job not in jobs:
            return False
        jobs.remove(job)
        self.num_bytes -= job.num_bytes
        if not jobs:
            del self.sessions[session]
        return True


class FairExecutor:
    """Worker thread with one queue per API key: round robin between keys, then their sessions.

    Used from one event loop. When a caller is cancelled, its queued work is dropped; running work
    is not interrupted, but its result is discarded. Owns its thread; `close` ends it.
    """

    def __init__(self, name: str, limits: QueueLimits) -> None:
        self._limits = limits
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._queues: dict[str, _KeyQueue] = {}
        self._waiting_bytes = 0
        self._agent_bytes = 0
        self._running = False

    @property
    def num_waiting(self) -> int:
        """Number of queued jobs, without the running one."""
        jobs = (queue.sessions.values() for queue in self._queues.values())
        return sum(len(each) for of_key in jobs for each in of_key)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def run(self, queue: QueueName, num_bytes: int, function: Callable[[], Result]) -> Result:
        """Run `function` in the worker thread and return its result.

        Raises QuotaExceeded or Overloaded if too many bytes are queued. Work of 0 bytes is never
        refused.
        """
        if self._running:
            self._check_room(queue, num_bytes)
        done = asyncio.get_running_loop().create_future()
        job = _Job(function, num_bytes, bool(queue.session), done)
        self._queues.setdefault(queue.key, _KeyQueue()).append(queue.session, job)
        self._count(job, num_bytes)
        if not self._running:
            self._start_next()
        try:
            result: Result = await job.done
            return result
        finally:
            self._drop(queue, job)
            # Breaks the cycle of exception, traceback and frame, which would keep the job's input.
            del job

    def _check_room(self, name: QueueName, num_bytes: int) -> None:
        if not num_bytes:
            return
        queue = self._queues.get(name.key, _KeyQueue())
        _check_share(queue.num_bytes, num_bytes, self._limits.key_bytes)
        if name.session:
            of_session = queue.session_bytes(name.session)
            _check_share(of_session, num_bytes, self._limits.key_bytes // SESSION_SHARE)
        total = self._limits.total_bytes
        of_agents = self._agent_bytes + num_bytes if name.session else 0
        if self._waiting_bytes + num_bytes > total or of_agents > total // AGENTS_SHARE:
            raise Overloaded(
                "too many bytes of requests are queued: repeat the request later",
                retry_after_seconds=RETRY_SECONDS,
            )

    def _count(self, job: _Job, num_bytes: int) -> None:
        """Add to the size of the queued work; a negative number when a job leaves its queue."""
        self._waiting_bytes += num_bytes
        self._agent_bytes += num_bytes if job.is_of_agent else 0

    def _start_next(self) -> None:
        """Start the first job of the next key in round-robin order."""
        key = next(iter(self._queues), None)
        if key is None:
            return
        queue = self._queues.pop(key)
        job = queue.take()
        self._count(job, -job.num_bytes)
        if queue.sessions:
            self._queues[key] = queue
        self._running = True
        work = asyncio.get_running_loop().run_in_executor(self._thread, job.function)
        work.add_done_callback(lambda finished: self._finish(job, finished))

    def _finish(self, job: _Job, finished: asyncio.Future[Any]) -> None:
        self._running = False
        self._start_next()
        if job.done.cancelled():
            return
        if finished.cancelled():
            job.done.cancel()
        elif error := finished.exception():
            job.done.set_exception(error)
        else:
            job.done.set_result(finished.result())

    def _drop(self, name: QueueName, job: _Job) -> None:
        """Remove a job from its queue; do nothing if the job has been started."""
        queue = self._queues.get(name.key)
        if queue is None or not queue.drop(name.session, job):
            return
        self._count(job, -job.num_bytes)
        if not queue.sessions:
            del self._queues[name.key]


def _check_share(num_queued: int, num_bytes: int, limit: int) -> None:
    """Refuse work beyond the share of a key or session; one that has none queued may have more."""
    if num_queued and num_queued + num_bytes > limit:
        raise QuotaExceeded(
            "too many bytes of requests of this API key are queued: repeat the request later",
            retry_after_seconds=RETRY_SECONDS,
        )

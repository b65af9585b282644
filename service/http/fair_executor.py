"""A worker thread with fair queueing between API keys."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from service.http.errors import Overloaded, QuotaExceeded

Result = TypeVar("Result")

RETRY_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Maximum queued work of a `FairExecutor` in bytes, per API key and over all keys."""

    key_bytes: int
    total_bytes: int


@dataclass(slots=True, eq=False)
class _Job:
    function: Callable[[], Any]
    num_bytes: int
    done: asyncio.Future[Any]


class FairExecutor:
    """Worker thread with one queue per API key: round robin between queues, FIFO within each.

    Used from one event loop. When a caller is cancelled, its queued work is dropped; running work
    is not interrupted, but its result is discarded. Owns its thread; `close` ends it.
    """

    def __init__(self, name: str, limits: QueueLimits) -> None:
        self._limits = limits
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._queues: dict[str, deque[_Job]] = {}
        self._waiting_bytes = 0
        self._running = False

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def run(self, queue: str, num_bytes: int, function: Callable[[], Result]) -> Result:
        """Run `function` in the worker thread and return its result.

        Raises QuotaExceeded or Overloaded if too many bytes are queued. Work of 0 bytes is never
        refused.
        """
        if self._running:
            self._check_room(queue, num_bytes)
        job = _Job(function, num_bytes, asyncio.get_running_loop().create_future())
        self._queues.setdefault(queue, deque()).append(job)
        self._waiting_bytes += num_bytes
        if not self._running:
            self._start_next()
        try:
            result: Result = await job.done
            return result
        finally:
            self._drop(queue, job)
            # Breaks the cycle of exception, traceback and frame, which would keep the job's input.
            del job

    def _check_room(self, queue: str, num_bytes: int) -> None:
        if not num_bytes:
            return
        of_key = sum(job.num_bytes for job in self._queues.get(queue, ()))
        if of_key and of_key + num_bytes > self._limits.key_bytes:
            raise QuotaExceeded(
                "too many bytes of requests of this API key are queued: repeat the request later",
                retry_after_seconds=RETRY_SECONDS,
            )
        if self._waiting_bytes + num_bytes > self._limits.total_bytes:
            raise Overloaded(
                "too many bytes of requests are queued: repeat the request later",
                retry_after_seconds=RETRY_SECONDS,
            )

    def _start_next(self) -> None:
        """Start the first job of the next queue in round-robin order."""
        queue = next(iter(self._queues), None)
        if queue is None:
            return
        jobs = self._queues.pop(queue)
        job = jobs.popleft()
        self._waiting_bytes -= job.num_bytes
        if jobs:
            self._queues[queue] = jobs
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

    def _drop(self, queue: str, job: _Job) -> None:
        """Remove a job from its queue; do nothing if the job has been started."""
        jobs = self._queues.get(queue)
        if jobs is None or job not in jobs:
            return
        jobs.remove(job)
        self._waiting_bytes -= job.num_bytes
        if not jobs:
            del self._queues[queue]

"""Work in threads, its results in order, a bounded number of them waiting."""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

NUM_THREADS = min(8, len(os.sched_getaffinity(0)))


def ahead(function: Callable[[T], R], jobs: Iterable[T]) -> Generator[R, None, None]:
    """When it is closed no thread is running any more."""
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="weights") as threads:
        try:
            for job in jobs:
                waiting.append(threads.submit(function, job))
                if len(waiting) > NUM_THREADS:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

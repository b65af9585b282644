"""Parallel map with ordered results and bounded buffering."""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

NUM_THREADS = min(8, len(os.sched_getaffinity(0)))


def map_in_order(function: Callable[[T], R], jobs: Iterable[T]) -> Generator[R, None, None]:
    """Applies the function in threads. After the generator is closed, no thread is running."""
    futures: deque[Future[R]] = deque()
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="weights") as threads:
        try:
            for job in jobs:
                futures.append(threads.submit(function, job))
                if len(futures) > NUM_THREADS:
                    yield futures.popleft().result()
            while futures:
                yield futures.popleft().result()
        finally:
            for future in futures:
                future.cancel()

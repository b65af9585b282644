"""The last leg of an asynchronous copy: from pinned memory to the arena, on a thread of its own.

The worker's one thread goes on to the next step; this one waits for the transfer, without holding
the interpreter, writes the arena and says so.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from engine.runtime.guard import Failure, attempt

OnDone = Callable[[Failure | None], None]
PendingCopy = tuple[torch.Tensor, Any, torch.Tensor, OnDone]


class CopyThread:
    """Owns its thread, which ends with the process. Flights land in the order they were given."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[PendingCopy] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._num_pending = 0
        threading.Thread(target=self._run, daemon=True, name="prompt-kv").start()

    def submit(self, staged: torch.Tensor, event: Any, out: torch.Tensor, on_done: OnDone) -> None:
        """`out` from `staged` once `event.synchronize()` returns; then `on_done`, exactly once."""
        with self._changed:
            self._num_pending += 1
        self._queue.put((staged, event, out, on_done))

    def flush(self) -> None:
        """Returns when `on_done` of every earlier flight has been called."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_pending == 0)

    def _run(self) -> None:
        while True:
            _finish_copy(*self._queue.get())  # keeps no view of the arena while it waits
            with self._changed:
                self._num_pending -= 1
                self._changed.notify_all()


def _finish_copy(staged: torch.Tensor, event: Any, out: torch.Tensor, on_done: OnDone) -> None:
    on_done(attempt(_copy, staged, event, out))


def _copy(staged: torch.Tensor, event: Any, out: torch.Tensor) -> None:
    event.synchronize()
    out.copy_(staged)

"""Last stage of an asynchronous export: copies from pinned memory to the arena on a thread.

The worker's own thread proceeds to the next step. This thread waits for the transfer without
holding the GIL, writes the arena and calls `on_done`.
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
    """Owner of a daemon thread. Copies complete in the order of submission."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[PendingCopy] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._num_pending = 0
        threading.Thread(target=self._run, daemon=True, name="prompt-kv").start()

    def submit(self, staged: torch.Tensor, event: Any, out: torch.Tensor, on_done: OnDone) -> None:
        """Copy `staged` to `out` once `event.synchronize()` returns, then call `on_done` once."""
        with self._changed:
            self._num_pending += 1
        self._queue.put((staged, event, out, on_done))

    def flush(self) -> None:
        """Return when `on_done` of every earlier copy has been called."""
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

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

Done = Callable[[Failure | None], None]
Flight = tuple[torch.Tensor, Any, torch.Tensor, Done]


class Landing:
    """Owns its thread, which ends with the process. Flights land in the order they were given."""

    def __init__(self) -> None:
        self._flights: queue.SimpleQueue[Flight] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._num_flying = 0
        threading.Thread(target=self._run, daemon=True, name="prompt-kv").start()

    def land(self, staged: torch.Tensor, moved: Any, out: torch.Tensor, done: Done) -> None:
        """`out` from `staged` once `moved.synchronize()` returns; then `done`, exactly once."""
        with self._changed:
            self._num_flying += 1
        self._flights.put((staged, moved, out, done))

    def settle(self) -> None:
        """Returns when `done` of every earlier flight has been called."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_flying == 0)

    def _run(self) -> None:
        while True:
            _landed(*self._flights.get())  # keeps no view of the arena while it waits
            with self._changed:
                self._num_flying -= 1
                self._changed.notify_all()


def _landed(staged: torch.Tensor, moved: Any, out: torch.Tensor, done: Done) -> None:
    done(attempt(_copy, staged, moved, out))


def _copy(staged: torch.Tensor, moved: Any, out: torch.Tensor) -> None:
    moved.synchronize()
    out.copy_(staged)

"""What the trainer hears, on a thread of its own: nobody who tells it is kept waiting by a step."""

import threading
from collections.abc import Iterable
from pathlib import Path

from engine.drafter.trainer.messages import Adopted, Paused, Sample, read_line
from engine.drafter.trainer.replay_buffer import Buffer


class Ears:
    """`lock` guards the buffer; the rest is set by one thread and read by the other."""

    def __init__(self) -> None:
        self.buffer = Buffer()
        self.lock = threading.Lock()
        self.paused = False
        self.adopted: Path | None = None
        self.ended = False

    def listen(self, lines: Iterable[bytes]) -> None:
        """Until there is no more to hear."""
        for line in lines:
            message = read_line(line)
            if isinstance(message, Sample):
                with self.lock:
                    self.buffer.add(message)
            elif isinstance(message, Paused):
                self.paused = message.paused
            elif isinstance(message, Adopted):
                self.adopted = Path(message.path)
        self.ended = True

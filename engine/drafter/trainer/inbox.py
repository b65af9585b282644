"""Messages to the trainer, read in their own thread so that a step does not block the sender."""

import threading
from collections.abc import Iterable
from pathlib import Path

from engine.drafter.trainer.messages import AdoptWeights, Sample, SetPaused, decode_line
from engine.drafter.trainer.replay_buffer import ReplayBuffer


class Inbox:
    """State set by messages.

    `lock` guards `buffer`; each other field is written by one thread and read by the other.
    """

    def __init__(self) -> None:
        self.buffer = ReplayBuffer()
        self.lock = threading.Lock()
        self.paused = False
        self.adopted: Path | None = None
        self.ended = False

    def receive(self, lines: Iterable[bytes]) -> None:
        """Process messages until the input ends."""
        for line in lines:
            message = decode_line(line)
            if isinstance(message, Sample):
                with self.lock:
                    self.buffer.add(message)
            elif isinstance(message, SetPaused):
                self.paused = message.paused
            elif isinstance(message, AdoptWeights):
                self.adopted = Path(message.path)
        self.ended = True

"""Replay buffer of training samples: the latest, and long ones of earlier weights versions.

The first responses to finish are short ones: a trainer that saw only the latest would forget how
long ones continue. So when the weights change, the longest responses of earlier versions are kept
next to those of the new version. Both parts have limits in tokens; a sample is in one of them.
"""

import random
import threading
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from engine.drafter.trainer.messages import AdoptWeights, Sample, SetPaused, decode_line

MAX_RECENT_TOKENS: Final = 200_000
MAX_LONG_TOKENS: Final = 50_000
LONG_SHARE: Final = 0.2
"""Share of draws that return long samples of earlier versions, if there are any."""


class ReplayBuffer:
    """Buffer of latest samples and of long earlier samples, which are drawn at random."""

    def __init__(
        self,
        *,
        max_recent_tokens: int = MAX_RECENT_TOKENS,
        max_long_tokens: int = MAX_LONG_TOKENS,
        seed: int = 0,
    ) -> None:
        self._recent: deque[Sample] = deque()
        self._long: list[Sample] = []
        self._max_recent_tokens, self._max_long_tokens = max_recent_tokens, max_long_tokens
        self._num_recent_tokens = 0
        self._version: str | None = None
        self._random = random.Random(seed)
        self.num_received = 0
        """Number of response tokens received in total."""

    def __len__(self) -> int:
        return len(self._recent) + len(self._long)

    def add(self, sample: Sample) -> None:
        if not sample.response:
            return
        if sample.version != self._version:
            self._retain_long()
            self._version = sample.version
        self._recent.append(sample)
        self._num_recent_tokens += _num_tokens(sample)
        self.num_received += len(sample.response)
        while self._num_recent_tokens > self._max_recent_tokens and len(self._recent) > 1:
            self._num_recent_tokens -= _num_tokens(self._recent.popleft())

    def draw(self) -> Sample:
        """Draw a random sample: with probability LONG_SHARE a long one, else a latest one."""
        assert len(self), "the buffer is empty"
        if self._long and (not self._recent or self._random.random() < LONG_SHARE):
            return self._random.choice(self._long)
        return self._recent[self._random.randrange(len(self._recent))]

    def _retain_long(self) -> None:
        """Keep the longest samples of the replaced weights version, up to half of the token limit.

        The limit keeps them from displacing all samples of earlier versions.
        """
        retained = _select_longest(self._recent, self._max_long_tokens // 2)
        room = self._max_long_tokens - sum(map(_num_tokens, retained))
        self._long = retained + _select_longest(self._long, room)
        self._recent.clear()
        self._num_recent_tokens = 0


def _select_longest(samples: "deque[Sample] | list[Sample]", room: int) -> list[Sample]:
    kept: list[Sample] = []
    for sample in sorted(samples, key=lambda sample: -len(sample.response)):
        if _num_tokens(sample) <= room:
            kept.append(sample)
            room -= _num_tokens(sample)
    return kept


def _num_tokens(sample: Sample) -> int:
    return len(sample.prompt) + len(sample.response)


class Inbox:
    """State of the trainer that is set by the messages it receives.

    Messages are read in a separate thread, so that a training step does not block the sender.
    `lock` guards `buffer`; each other field is written by one thread and read by the other.
    """

    def __init__(self) -> None:
        self.buffer = ReplayBuffer()
        self.lock = threading.Lock()
        self.paused = False
        self.adopted: Path | None = None
        self.ended = False

    def receive(self, lines: Iterable[bytes]) -> None:
        """Process messages, one per line, until the input ends."""
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

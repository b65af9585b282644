"""What there is to learn from: the newest responses, and long ones of earlier versions.

Responses that have ended are short ones first: whoever learned of the newest only would forget how
long ones go on. So when the weights change, the longest of what the earlier ones said are kept
beside what the new ones say. Both parts are bounded in tokens; a sample is in one of them.
"""

import random
from collections import deque
from typing import Final

from engine.drafter.trainer.messages import Sample

NEWEST_TOKENS: Final = 200_000
LONG_TOKENS: Final = 50_000
LONG_SHARE: Final = 0.2
"""Of the samples drawn, once there are any."""


class Buffer:
    def __init__(
        self, *, newest_tokens: int = NEWEST_TOKENS, long_tokens: int = LONG_TOKENS, seed: int = 0
    ) -> None:
        self._newest: deque[Sample] = deque()
        self._long: list[Sample] = []
        self._newest_tokens, self._long_tokens = newest_tokens, long_tokens
        self._held = 0
        self._version: str | None = None
        self._random = random.Random(seed)
        self.num_received = 0
        """Tokens of responses, ever."""

    def __len__(self) -> int:
        return len(self._newest) + len(self._long)

    def add(self, sample: Sample) -> None:
        if not sample.response:
            return
        if sample.version != self._version:
            self._keep_long()
            self._version = sample.version
        self._newest.append(sample)
        self._held += _size(sample)
        self.num_received += len(sample.response)
        while self._held > self._newest_tokens and len(self._newest) > 1:
            self._held -= _size(self._newest.popleft())

    def draw(self) -> Sample:
        """Newest ones as likely as each other, long ones of earlier versions now and then."""
        assert len(self), "nothing to learn from"
        if self._long and (not self._newest or self._random.random() < LONG_SHARE):
            return self._random.choice(self._long)
        return self._newest[self._random.randrange(len(self._newest))]

    def _keep_long(self) -> None:
        """Half of the room is for the version that ends: none crowds all others out."""
        own = _longest(self._newest, self._long_tokens // 2)
        room = self._long_tokens - sum(map(_size, own))
        self._long = own + _longest(self._long, room)
        self._newest.clear()
        self._held = 0


def _longest(samples: "deque[Sample] | list[Sample]", room: int) -> list[Sample]:
    kept: list[Sample] = []
    for sample in sorted(samples, key=lambda sample: -len(sample.response)):
        if _size(sample) <= room:
            kept.append(sample)
            room -= _size(sample)
    return kept


def _size(sample: Sample) -> int:
    return len(sample.prompt) + len(sample.response)

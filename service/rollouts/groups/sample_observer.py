"""Protocol of a receiver of tokens and samples that has no use for the log of a rollout."""

from typing import Protocol

from coppice.wire.rollouts import SampleAnswer
from engine.types.samples import TokenDelta


class SampleObserver(Protocol):
    """Receiver of the tokens and the ends of a rollout's samples, in the event loop.

    on_delta: tokens of a running sample, given its index. on_sample: a sample that has ended, with
    all its tokens. on_end: the rollout has ended.
    """

    def on_delta(self, index: int, delta: TokenDelta) -> None: ...

    def on_sample(self, sample: SampleAnswer) -> None: ...

    def on_end(self) -> None: ...

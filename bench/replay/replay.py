"""Simulates step by step how an engine would generate a recorded trace with drafts.

All running requests step together, each advancing by its own accepted tokens, so a sibling's text
has the length it would have at that time. A request's first token comes from its prefill, without a
draft. When a request ends, the next one starts.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bench.replay.costs import Costs, LinearCost
from bench.replay.drafters import Drafter
from bench.replay.traces import Group
from kernels.draft_index.store_protocol import DraftBatch, Int32Array


class Controller(Protocol):
    """Interface of a controller that decides how many tokens of each draft to verify.

    The engine's controller can be used in its place.
    """

    def should_draft(self, running: int) -> bool: ...

    def lengths(self, drafted: DraftBatch, *, running: int, context: int) -> Int32Array:
        """Number of tokens of each draft to send to verification."""

    def record_acceptance(
        self, drafted: DraftBatch, sent: NDArray[np.int64], right: NDArray[np.int64]
    ) -> None: ...

    def record_step(
        self, *, running: int, context: int, verified: int, seconds: float, emitted: int
    ) -> None:
        """Record the actual time of the last step."""


class StatelessPolicy:
    """Base of draft-length controllers that ignore measured step times and acceptance."""

    def should_draft(self, running: int) -> bool:
        return True

    def record_acceptance(self, *_: object) -> None:
        """No-op: the policy does not learn."""

    def record_step(self, **_: float) -> None:
        """No-op: the policy does not learn."""


@dataclass(frozen=True, slots=True)
class Fixed(StatelessPolicy):
    """Draft-length controller that sends a fixed number of tokens of every draft."""

    length: int

    def lengths(self, drafted: DraftBatch, *, running: int, context: int) -> Int32Array:
        sent: Int32Array = np.minimum(drafted.lengths, self.length).astype(np.int32)
        return sent


@dataclass(frozen=True, slots=True)
class ThresholdPolicy(StatelessPolicy):
    """Draft-length controller: sends tokens up to a minimum cumulative acceptance probability."""

    threshold: float

    def lengths(self, drafted: DraftBatch, *, running: int, context: int) -> Int32Array:
        likely = np.cumprod(drafted.probability, axis=1) >= self.threshold
        sent: Int32Array = np.minimum(drafted.lengths, likely.sum(axis=1)).astype(np.int32)
        return sent


TAIL = 4
"""Most running requests of the steps that are counted as the tail of a workload."""


@dataclass(slots=True)
class Times:
    """Simulated time of some steps, and the time of their tokens in steps without drafts.

    A step without drafts has the same running requests, each with one token.
    """

    seconds: float = 0.0
    without_drafts: float = 0.0

    @property
    def speedup(self) -> float:
        return self.without_drafts / self.seconds if self.seconds else 1.0


@dataclass(slots=True)
class ReplayResult:
    """Counts and simulated time of the decode steps of a replay."""

    steps: int = 0
    passes: int = 0
    """Number of forward passes, counted per request: the sum of rows over all steps."""
    emitted: int = 0
    sent: int = 0
    seconds: float = 0.0
    by_group: dict[bytes, list[int]] = field(default_factory=dict)
    """Forward passes and tokens of each group."""
    tail: Times = field(default_factory=Times)
    """Times of the steps with at most TAIL running requests."""

    @property
    def accepted_length(self) -> float:
        """Mean tokens that a request gains per forward pass, including the sampled one."""
        return self.emitted / max(self.passes, 1)

    @property
    def acceptance(self) -> float:
        """Fraction of the sent draft tokens that were accepted."""
        return (self.emitted - self.passes) / max(self.sent, 1)

    @property
    def passes_saved(self) -> float:
        return 1 - self.passes / max(self.emitted, 1)


@dataclass(slots=True)
class Request:
    group: bytes
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    slot: int = -1
    done: int = 0

    @property
    def left(self) -> tuple[int, ...]:
        return self.response[self.done :]


@dataclass(slots=True, kw_only=True)
class Replay:
    drafter: Drafter
    controller: Controller
    max_running: int = 64
    max_draft_tokens: int = 16
    costs: Costs = field(default_factory=lambda: LinearCost(fixed=1.0, token=0.0))
    is_oracle: bool = False
    """True if only the part of each draft that will be accepted is sent, as by an oracle."""
    result: ReplayResult = field(default_factory=ReplayResult)

    def epoch(self, number: int, groups: Iterable[Group]) -> None:
        """Replay all responses of one epoch of a trace, in the order of requests."""
        for _ in self.steps(number, enumerate(groups)):
            pass

    def steps(self, number: int, groups: Iterable[tuple[int, Group]]) -> Iterator[None]:
        """Replay one epoch as `epoch` does, and yield after each step; groups have their index."""
        waiting = deque(
            Request(b"%d/%d" % (number, index), group.prompt, response)
            for index, group in groups
            for response in group.responses
        )
        running: list[Request] = []
        came: list[tuple[int, ...]] = []
        while waiting or running:
            while waiting and len(running) < self.max_running:
                request = waiting.popleft()
                request.slot = self.drafter.begin(request.group, request.prompt)
                request.done = 1
                running.append(request)
                came.append(request.response[:1])
            drafts = self.drafter.step([one.slot for one in running], came, self.max_draft_tokens)
            came = self._verify(running, drafts)
            left = []
            for one, tokens in zip(running, came, strict=True):
                one.done += len(tokens)
                if one.left:
                    left.append((one, tokens))
                else:
                    self.drafter.end(one.slot, tokens)
            running, came = [one for one, _ in left], [tokens for _, tokens in left]
            yield

    def _verify(self, running: Sequence[Request], drafts: DraftBatch) -> list[tuple[int, ...]]:
        context = sum(len(one.prompt) + one.done for one in running)
        sent = self._sent(running, drafts, context)
        came = [one.left[: number + 1] for one, number in zip(running, sent.right, strict=True)]
        for one, tokens in zip(running, came, strict=True):
            counted = self.result.by_group.setdefault(one.group, [0, 0])
            counted[0] += bool(tokens)
            counted[1] += len(tokens)
        emitted, passes = sum(map(len, came)), sum(map(bool, came))
        verified = sum(sent.right if self.is_oracle else sent.lengths)
        step = {"running": len(running), "context": context}
        seconds = self.costs.of(**step, tokens=passes + verified)
        self.controller.record_step(
            **step, verified=passes + verified, seconds=seconds, emitted=emitted
        )
        self.result.steps += 1
        self.result.passes += passes
        self.result.emitted += emitted
        self.result.sent += verified
        self.result.seconds += seconds
        if len(running) <= TAIL:
            self.result.tail.seconds += seconds
            without = self.costs.of(**step, tokens=passes) / passes
            self.result.tail.without_drafts += without * emitted
        return came

    def _sent(self, running: Sequence[Request], drafts: DraftBatch, context: int) -> "Sent":
        """Apply the controller to a step's drafts: how many tokens are sent, and are correct.

        The controller also learns whether the first token that was not sent is correct, since the
        token emitted after the draft shows it.
        """
        if not self.controller.should_draft(len(running)):
            return Sent([0] * len(running), [0] * len(running))
        sent = self.controller.lengths(drafts, running=len(running), context=context)
        right = np.array(
            [
                common_prefix_length(drafts.tokens[row, :number].tolist(), one.left)
                for row, (one, number) in enumerate(zip(running, drafts.lengths, strict=True))
            ]
        )
        self.controller.record_acceptance(
            drafts, sent.astype(np.int64), np.minimum(right, sent + 1)
        )
        return Sent(sent.tolist(), np.minimum(right, sent).tolist())


@dataclass(frozen=True, slots=True)
class Sent:
    """Numbers of sent and of correct draft tokens of each request in a step."""

    lengths: list[int]
    right: list[int]


def common_prefix_length(draft: Sequence[int], text: Sequence[int]) -> int:
    pairs = enumerate(zip(draft, text, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(draft), len(text)))

"""Stream of new tokens of a request's samples, with their text; shared by all streaming APIs.

The parts of a sample are its tokens as they are sampled. Their concatenated texts are the text of
the answer without a stream.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from coppice.wire.packed.results import EndRecord, SampleRecord, TokensRecord
from coppice.wire.rollouts import SampleAnswer
from engine.types.samples import Sampling, TopLogprobs
from service.compat.logprobs import sample_logprobs
from service.rollouts.record_reader import SampleKey
from service.rollouts.rollout import Rollout
from service.server import Server

T = TypeVar("T")
INLINE_VALUES = 256
"""Maximum number of logprobs of a part whose events are built on the event loop."""
NOTHING_SAMPLED: dict[str, Any] = {
    "token_ids": [],
    "logprobs": [],
    "versions": [],
    "stop_reason": None,
    "support": None,
}
"""Fields of a sample with `max_tokens: 0`, for which the engine has sampled one token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePart:
    """Next tokens of a sample, from index `start` on.

    `version` is the weights version of the last token. The last part of a sample has its answer and
    may have no tokens.
    """

    group: int
    index: int
    start: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    top_logprobs: Sequence[TopLogprobs]
    version: str | None
    sample: SampleAnswer | None = None

    @property
    def key(self) -> SampleKey:
        return self.group, self.index

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def is_large(self) -> bool:
        """True if building its events may block the event loop.

        The last part is large, since it may have the whole message and the supports.
        """
        num_values = len(self.token_ids) + sum(map(len, self.top_logprobs))
        return self.sample is not None or num_values > INLINE_VALUES

    async def run(self, build: Callable[[], T]) -> T:
        """Result of `build`, which is called in a thread if the part is large."""
        return await asyncio.to_thread(build) if self.is_large else build()

    def without_tokens(self) -> "SamplePart":
        """The last part of a sample as if nothing had been sampled."""
        assert self.sample is not None, "the last part"
        sample = self.sample.model_copy(update=NOTHING_SAMPLED)
        return replace(self, start=0, token_ids=[], logprobs=[], top_logprobs=[], sample=sample)


async def sample_parts(rollout: Rollout) -> AsyncIterator[SamplePart | EndRecord]:
    """Yield the parts of a rollout's samples, and its end.

    The last tokens of a sample are in the same part as its end, so that a client that measures the
    time between parts counts no part without tokens.
    """
    ends = Counter[SampleKey]()
    async for record in rollout.records(completes_samples=False):
        match record:
            case TokensRecord():
                part = _running_part(rollout, record)
                ends[part.key] = part.end
                yield part
            case SampleRecord(group=group, sample=sample):
                yield _last_part(rollout, group, sample, ends.pop((group, sample.index), 0))
            case EndRecord():
                yield record


def _running_part(rollout: Rollout, record: TokensRecord) -> SamplePart:
    end = record.start + len(record.token_ids)
    return SamplePart(
        group=record.group,
        index=record.index,
        start=record.start,
        token_ids=record.token_ids,
        logprobs=record.logprobs,
        top_logprobs=sample_logprobs(rollout, record.group, record.index, record.start, end),
        version=record.versions[-1].version,
    )


def _last_part(rollout: Rollout, group: int, sample: SampleAnswer, start: int) -> SamplePart:
    return SamplePart(
        group=group,
        index=sample.index,
        start=start,
        token_ids=sample.token_ids[start:],
        logprobs=sample.logprobs[start:],
        top_logprobs=sample_logprobs(rollout, group, sample.index, start),
        version=sample.versions[-1].version if sample.versions else None,
        sample=sample,
    )


class StreamedText:
    """Text of one sample's parts. Each call returns the text that its tokens complete."""

    def __init__(self, server: Server, sampling: Sampling) -> None:
        self._tokenizer = server.tokenizer
        self._sampling = sampling
        self._stream = server.engine.response_stream(sampling)
        self._sent: list[str] = []

    async def next(self, part: SamplePart) -> str:
        if part.sample is None:
            text = (await self._tokenizer.add(self._stream, part.token_ids)).content or ""
        else:
            whole = await self._tokenizer.response_text(
                part.sample.token_ids, part.sample.stop_reason, self._sampling
            )
            text = remainder(whole, "".join(self._sent)) or ""
        self._sent.append(text)
        return text


def remainder(whole: str, sent: str) -> str | None:
    """Text after what was sent; None if the whole does not begin with it."""
    return whole.removeprefix(sent) if whole.startswith(sent) else None

"""Reader of a rollout's result log, for streams; also sends tokens of running samples.

The tokens are held once per sample, and a reader holds positions only. So a slow reader takes no
memory: it receives the tokens that it has missed in one record.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from coppice.wire.columns.token_columns import TokenLists
from coppice.wire.columns.weights_version_spans import VersionSpan, cut_spans, joined_spans
from coppice.wire.packed.results import (
    EndRecord,
    ProgressRecord,
    Record,
    SampleRecord,
    TokensRecord,
)
from coppice.wire.rollouts import SampleAnswer
from service.rollouts.fairness import TimeSlice

PROGRESS_SECONDS = 15.0

SampleKey = tuple[int, int]
"""Indices of a group and of a sample of the group."""


@dataclass(slots=True)
class PartialSample:
    """Tokens that a running sample has generated so far, without those that it resumes."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)

    def add(self, new: TokenLists) -> None:
        """Append tokens in place: copies of all earlier ones would take time in their square."""
        parts = [(self.versions, len(self.token_ids)), (new.versions, len(new.token_ids))]
        self.versions = joined_spans(parts)
        self.token_ids += new.token_ids
        self.logprobs += new.logprobs


class RecordReader:
    """One reader of a rollout's log, at its own position.

    With `partial`, the tokens of running samples are read, too. `num_resumed` are the numbers of
    tokens that resumed samples began with. With `completes_samples`, the last tokens of a sample
    are read as a tokens record before the sample itself.
    """

    def __init__(
        self,
        log: Sequence[Record],
        partial: dict[SampleKey, PartialSample] | None,
        num_resumed: dict[SampleKey, int],
        *,
        completes_samples: bool = True,
    ) -> None:
        self._log = log
        self._partial = partial
        self._num_resumed = num_resumed
        self._completes_samples = completes_samples
        self._position = 0
        self._grown: dict[SampleKey, None] = dict.fromkeys(partial or ())
        self._num_read: dict[SampleKey, int] = {}
        self._changed = asyncio.Event()
        self._ended = False

    def on_end(self) -> None:
        """Stop after the records that are available, also without an end record."""
        self._ended = True
        self._changed.set()

    def on_record(self) -> None:
        self._changed.set()

    def on_tokens(self, key: SampleKey) -> None:
        self._grown[key] = None
        self._changed.set()

    async def records(self, progress: Callable[[], ProgressRecord]) -> AsyncIterator[Record]:
        """Yield all records from the first to the last, waiting for new ones.

        While there is no new record, yields a progress record every PROGRESS_SECONDS.
        """
        turn = TimeSlice()
        while True:
            self._changed.clear()
            for record in self._available():
                yield record
                if isinstance(record, EndRecord):
                    return
                await turn.pause()
            if self._ended:
                return
            if not await self._wait():
                yield progress()

    def _available(self) -> Iterator[Record]:
        while True:
            if self._position < len(self._log):
                record = self._log[self._position]
                self._position += 1
                if isinstance(record, SampleRecord) and self._partial is not None:
                    yield from self._last_tokens(record)
                yield record
            elif self._grown:
                yield from self._new_tokens(next(iter(self._grown)))
            else:
                return

    def _new_tokens(self, key: SampleKey) -> Iterator[TokensRecord]:
        del self._grown[key]
        assert self._partial is not None, "only tokens that are read can grow"
        partial = self._partial.get(key)
        if partial is not None:  # otherwise the sample's record is in the log
            yield from self._tokens(key, 0, partial)

    def _last_tokens(self, record: SampleRecord) -> Iterator[TokensRecord]:
        sample = record.sample
        key = (record.group, sample.index)
        if self._completes_samples:
            start = self._num_resumed.get(key, 0)
            yield from self._tokens(key, start, sample)
        self._num_read.pop(key, None)

    def _tokens(
        self, key: SampleKey, offset: int, tokens: PartialSample | SampleAnswer
    ) -> Iterator[TokensRecord]:
        """Tokens record of a sample's unread tokens, which follow `offset` other ones."""
        num_read = self._num_read.get(key, 0)
        start, end = num_read + offset, len(tokens.token_ids)
        if start == end:
            return
        self._num_read[key] = end - offset
        group, index = key
        yield TokensRecord(
            group=group,
            index=index,
            start=num_read + self._num_resumed.get(key, 0),
            token_ids=tokens.token_ids[start:end],
            logprobs=tokens.logprobs[start:end],
            versions=cut_spans(tokens.versions, start, end),
        )

    async def _wait(self) -> bool:
        """Wait for a change; false if there was none for PROGRESS_SECONDS."""
        try:
            async with asyncio.timeout(PROGRESS_SECONDS):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

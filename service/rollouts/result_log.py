"""Append-only log of a rollout's results, read by streamed and plain responses.

The log is append-only and any number of readers can read it from the start, so a streamed and a
plain answer are two views of the same run.
"""

import asyncio
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence

from coppice.wire.chat import ParsedMessage
from coppice.wire.columns.token_columns import TokenLists, column_bytes
from coppice.wire.packed.results import (
    EndRecord,
    GroupRecord,
    KvRecord,
    ProgressRecord,
    Record,
    SampleRecord,
    SegmentRecord,
    StartRecord,
)
from coppice.wire.rollouts import GroupAnswer, GroupHead, SampleAnswer, SegmentAnswer, Usage
from service.kv.handles.group_exports import KvState
from service.rollouts.fairness import TimeSlice
from service.rollouts.groups.sample_observer import SampleObserver
from service.rollouts.record_reader import PartialSample, RecordReader, SampleKey
from service.rollouts.trees.tree_answer import with_num_leaves

ROLLOUT_BYTES = 12 * 2**10
GROUP_BYTES = 4096
PART_BYTES = 1536
TOOL_CALL_BYTES = 1024
ECHOED_TOKEN_BYTES = 52
"""An integer, and its places in the lists of the answer and of the log."""


class ResultLog:
    """Records and answers of one rollout, and its readers.

    With `streams_tokens`, readers receive the tokens of running samples, too. `num_resumed` are the
    numbers of tokens that resumed samples began with. `num_bytes` is the estimated memory of the
    log and of the answers. The `observer` receives each sample that has ended, and the end.
    """

    def __init__(
        self,
        rollout_id: str,
        num_groups: int,
        *,
        streams_tokens: bool,
        num_resumed: dict[SampleKey, int],
    ) -> None:
        self.observer: SampleObserver | None = None
        self.num_resumed = num_resumed
        self.num_bytes = ROLLOUT_BYTES + GROUP_BYTES * num_groups
        self.answers: dict[int, GroupAnswer] = {}
        self.records: list[Record] = [StartRecord(id=rollout_id)]
        self._partial: dict[SampleKey, PartialSample] | None = {} if streams_tokens else None
        self._readers: set[RecordReader] = set()
        self._changed = asyncio.Event()
        self._ended = False
        self._is_closed = False

    @property
    def streams_tokens(self) -> bool:
        return self._partial is not None

    @property
    def has_readers(self) -> bool:
        return bool(self._readers)

    async def wait_for_change(self) -> None:
        await self._changed.wait()

    def usage(self) -> Usage:
        answers = self.answers.values()
        return Usage(
            num_prompt_tokens=sum(answer.num_prompt_tokens for answer in answers),
            num_generated_tokens=sum(answer.num_generated_tokens for answer in answers),
            num_samples=sum(answer.num_samples for answer in answers),
        )

    def add_tokens(self, group: int, index: int, new: TokenLists) -> None:
        """Add tokens of a running sample."""
        assert self._partial is not None, "the tokens are streamed"
        self._partial.setdefault((group, index), PartialSample()).add(new)
        for reader in self._readers:
            reader.on_tokens((group, index))

    def restore_tokens(self, group: int, index: int, tokens: TokenLists) -> None:
        """Set the tokens of a sample that continues, in place of those before it was suspended."""
        assert self._partial is not None, "the tokens are streamed"
        self._partial.pop((group, index), None)
        self.add_tokens(group, index, tokens)

    def add_part(self, group: int, part: SampleAnswer | SegmentAnswer) -> None:
        """Add a finished sample or segment. A sample has all tokens of the partial one."""
        self.num_bytes += _num_bytes(part)
        if isinstance(part, SegmentAnswer):
            return self._append(SegmentRecord(group=group, segment=part))
        if self._partial is not None:
            self._partial.pop((group, part.index), None)
        self._append(SampleRecord(group=group, sample=part))
        if self.observer is not None:
            self.observer.on_sample(part)

    def add_kv(self, group: int, segment: str | None, state: KvState) -> None:
        """Add the prompt KV of a group, or of a segment, or the reason why a segment has none.

        The reason why a group has none is in its answer.
        """
        if segment is not None or state.kv is not None:
            self._append(KvRecord(group=group, segment=segment, **state._asdict()))

    def add_answer(self, answer: GroupAnswer) -> None:
        head = GroupHead.model_validate(answer.model_dump(exclude={"samples", "segments"}))
        self._add_answer(answer, head)

    def _add_answer(self, answer: GroupAnswer, head: GroupHead) -> None:
        self.num_bytes += _num_group_bytes(answer)
        self.answers[answer.index] = answer
        self._append(GroupRecord(group=head))

    def end(self, record: EndRecord | None) -> None:
        """End the log, without a record if the rollout continues elsewhere."""
        if record is not None:
            self._append(record)
        self._ended = True
        self._notify()
        for reader in self._readers:
            reader.on_end()
        if self.observer is not None:
            self.observer.on_end()

    def close(self) -> None:
        """Ignore later records: another replica has the results."""
        self._is_closed = True

    def clear(self) -> None:
        """Free the results, which another replica has."""
        self.records, self.answers = [], {}
        self.num_bytes = ROLLOUT_BYTES

    async def read(
        self, progress: Callable[[], ProgressRecord], *, completes_samples: bool = True
    ) -> AsyncIterator[Record]:
        """Yield the records, as in `RecordReader.records`."""
        reader = RecordReader(
            self.records, self._partial, self.num_resumed, completes_samples=completes_samples
        )
        self._readers.add(reader)
        if self._ended:
            reader.on_end()
        try:
            async for record in reader.records(progress):
                yield record
        finally:
            self._readers.discard(reader)

    async def restore(self, records: Sequence[Record]) -> None:
        """Add the records of another replica's log."""
        samples = defaultdict[int, list[SampleAnswer]](list)
        segments = defaultdict[int, list[SegmentAnswer]](list)
        turn = TimeSlice()
        for record in records:
            await turn.pause()
            if isinstance(record, SampleRecord):
                samples[record.group].append(record.sample)
                self.add_part(record.group, record.sample)
            elif isinstance(record, SegmentRecord):
                segments[record.group].append(record.segment)
                self.add_part(record.group, record.segment)
            elif isinstance(record, GroupRecord):
                index = record.group.index
                await self._restore_answer(record.group, samples[index], segments[index])

    async def _restore_answer(
        self,
        head: GroupHead,
        samples: Sequence[SampleAnswer],
        segments: Sequence[SegmentAnswer],
    ) -> None:
        by_index = sorted(samples, key=lambda sample: sample.index)
        tree = None
        if head.leaves is not None:
            tree = await asyncio.to_thread(with_num_leaves, segments)
        self._add_answer(GroupAnswer(**dict(head), samples=by_index, segments=tree), head)

    def _append(self, record: Record) -> None:
        if not self._is_closed:
            self.records.append(record)
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        for reader in self._readers:
            reader.on_record()


def _num_group_bytes(answer: GroupAnswer) -> int:
    """Estimated memory of what a group's answer holds for the whole group, in bytes."""
    num_bytes = ECHOED_TOKEN_BYTES * len(answer.prompt_token_ids or ())
    if answer.prompt_logprobs is not None:
        num_bytes += answer.prompt_logprobs.logprobs.nbytes
        num_bytes += answer.prompt_logprobs.top_logprobs.num_bytes
    return num_bytes


def _num_message_bytes(message: ParsedMessage) -> int:
    calls = (text for call in message.tool_calls for text in (call.id, call.name, call.arguments))
    texts = (message.content, message.reasoning, *calls)
    return PART_BYTES + TOOL_CALL_BYTES * len(message.tool_calls) + sum(map(sys.getsizeof, texts))


def _num_bytes(part: SampleAnswer | SegmentAnswer) -> int:
    """Estimated memory of a log record in bytes."""
    size = PART_BYTES + column_bytes(part)
    if isinstance(part, SegmentAnswer):
        # Counted twice: the log has the segment as it was when it ended, the answer as it is now.
        return 2 * size
    size += 0 if part.message is None else _num_message_bytes(part.message)
    return size + sys.getsizeof(part.text)

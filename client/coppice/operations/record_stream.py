"""Reader of streamed rollouts (NDJSON): parsing, reconnects without duplicates, final result."""

from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace

from pydantic import ValidationError

from coppice.errors import BadAnswer, CoppiceError, RolloutLost, StreamBroken, error_of
from coppice.rollout_results import (
    Group,
    RolloutResult,
    Sample,
    Segment,
    group_of,
    sample_of,
    segment_of,
)
from coppice.transport.driver import Driver
from coppice.transport.messages import HttpRequest
from coppice.transport.retry import RequestSender
from coppice.wire.columns.weights_version_spans import cut_spans
from coppice.wire.packed.results import (
    RECORD,
    EndRecord,
    GroupRecord,
    KvRecord,
    ProgressRecord,
    Record,
    SampleRecord,
    SegmentRecord,
    StartRecord,
    TokensRecord,
)
from coppice.wire.rollouts import GroupHead

RecordKey = tuple[str, int, int | str]
NDJSON = "application/x-ndjson"


class NdjsonReader:
    """Incremental parser of one stream of rollout records in newline-delimited JSON.

    A record is complete when its line break has arrived.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.ended = False

    def feed(self, chunk: bytes) -> Iterator[Record]:
        self._buffer += chunk
        if b"\n" not in chunk:
            return
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            record = _record_of(line) if line.strip() else None
            if record is not None and not self.ended:
                self.ended = isinstance(record, EndRecord)
                yield record

    def finish(self) -> None:
        """Raises StreamBroken if there was no end record; must be called when the stream ends."""
        if not self.ended:
            raise StreamBroken("the stream ended without its end record")


def _record_of(line: bytearray) -> Record | None:
    """Parses one line of a record stream; returns None if the record type is unknown."""
    try:
        return RECORD.validate_json(line)
    except ValidationError as error:
        if error.errors()[0]["type"] == "union_tag_invalid":
            return None
        raise BadAnswer(f"a line of the stream is not a valid record: {error}") from error


class RecordDeduplicator:
    """Filters out rollout records that were already delivered before a reconnect.

    Every connection starts with the rollout's first record. Progress records are not replayed; they
    are passed on once the replay has reached new records. Tokens records are replayed with other
    boundaries and are cut to their new tokens.
    """

    def __init__(self) -> None:
        self.rollout_id: str | None = None
        self.ended = False
        self._delivered: set[RecordKey] = set()
        self._tokens_end: dict[tuple[int, int], int] = {}
        self._num_to_replay = 0
        self._has_started = False

    def on_reconnect(self) -> None:
        """Prepares for a replay of the records; must be called before every connection."""
        self._num_to_replay = len(self._delivered)
        self._has_started = False

    def new_part(self, record: Record) -> Record | None:
        """Returns a record, or the part of it that was not delivered; None if all of it was."""
        if not isinstance(record, TokensRecord):
            return record if self.is_new(record) else None
        self._check_beginning(record)
        key, end = (record.group, record.index), record.start + len(record.token_ids)
        num_old = max(self._tokens_end.get(key, 0) - record.start, 0)
        self._tokens_end[key] = max(self._tokens_end.get(key, 0), end)
        return _without_first(record, num_old) if record.start + num_old < end else None

    def is_new(self, record: Record) -> bool:
        self._check_beginning(record)
        if isinstance(record, ProgressRecord):
            return self._num_to_replay == 0
        assert not isinstance(record, TokensRecord), "cut by new_part"
        key = _key(record)
        if key in self._delivered:
            self._num_to_replay -= 1
            return False
        if isinstance(record, EndRecord):
            self._check_end()
        self._delivered.add(key)
        return True

    def _check_beginning(self, record: Record) -> None:
        if isinstance(record, StartRecord):
            known, self.rollout_id = self.rollout_id, record.id
            if known not in (None, record.id):
                raise RolloutLost(
                    f"the server no longer has rollout {known} and started {record.id} in its place"
                )
            self._has_started = True
        if not self._has_started:
            raise BadAnswer("the stream does not begin with a start record")

    def _check_end(self) -> None:
        if self._num_to_replay > 0:
            raise RolloutLost(f"rollout {self.rollout_id} was replayed without some of its records")
        self.ended = True


def _without_first(record: TokensRecord, num_tokens: int) -> TokensRecord:
    if not num_tokens:
        return record
    length = len(record.token_ids)
    return record.model_copy(
        update={
            "start": record.start + num_tokens,
            "token_ids": record.token_ids[num_tokens:],
            "logprobs": record.logprobs[num_tokens:],
            "versions": cut_spans(record.versions, num_tokens, length),
        }
    )


def _key(
    record: SampleRecord | SegmentRecord | KvRecord | GroupRecord | StartRecord | EndRecord,
) -> RecordKey:
    match record:
        case SampleRecord():
            return (record.type, record.group, record.sample.index)
        case SegmentRecord():
            return (record.type, record.group, record.segment.id)
        case KvRecord():
            return (record.type, record.group, record.segment or 0)
        case GroupRecord():
            return (record.type, record.group.index, 0)
        case _:
            return (record.type, 0, 0)


async def stream_records(
    sender: RequestSender, call: HttpRequest, deduplicator: RecordDeduplicator
) -> AsyncGenerator[Record, None]:
    """Yields each record of a rollout once, across reconnects.

    A repeated request replays all records from the first one.
    """
    retry_state = sender.retry_state(call)
    while not deduplicator.ended:
        deduplicator.on_reconnect()
        try:
            async with aclosing(_read_connection(sender.driver, call)) as records:
                async for record in records:
                    new = deduplicator.new_part(record)
                    if new is not None:
                        retry_state.reset()
                        yield new
        except CoppiceError as error:
            # After the end record the stream is complete, however the connection ends.
            if not deduplicator.ended and not await retry_state.wait_before_retry(error):
                raise


async def _read_connection(driver: Driver, call: HttpRequest) -> AsyncGenerator[Record, None]:
    reader = NdjsonReader()
    async with aclosing(driver.receive(call)) as chunks:
        async for chunk in chunks:
            for record in reader.feed(chunk):
                yield record
    reader.finish()


class Collector:
    """Collects the records of a rollout stream into a RolloutResult.

    Samples are converted to arrays when they arrive: as lists they take ten times the memory.
    """

    def __init__(self) -> None:
        self._start: StartRecord | None = None
        self._end: EndRecord | None = None
        self._heads: dict[int, GroupHead] = {}
        self._samples: defaultdict[int, list[Sample]] = defaultdict(list)
        self._segments: defaultdict[int, list[Segment]] = defaultdict(list)
        self._kv: defaultdict[int, dict[str, KvRecord]] = defaultdict(dict)

    def add(self, record: Record) -> None:
        match record:
            case StartRecord():
                self._start = record
            case SampleRecord():
                self._samples[record.group].append(sample_of(record.sample))
            case SegmentRecord():
                self._segments[record.group].append(segment_of(record.segment))
            case GroupRecord():
                self._heads[record.group.index] = record.group
            case KvRecord(segment=str(segment)):
                self._kv[record.group][segment] = record
            case ProgressRecord() | KvRecord() | TokensRecord():
                pass  # GroupRecord has the group's own handle, and SampleRecord all tokens
            case EndRecord():
                self._end = record

    def result(self) -> RolloutResult:
        """Returns the collected result. Raises the server's error if the whole rollout failed."""
        if self._start is None or self._end is None:
            raise BadAnswer("the stream has no start record or no end record")
        if self._end.outcome == "failed" and self._end.problem is not None:
            raise error_of(self._end.problem)
        return RolloutResult(
            id=self._start.id,
            outcome=self._end.outcome,
            groups=self._groups(),
            usage=self._end.usage,
        )

    def _groups(self) -> tuple[Group, ...]:
        with_parts = self._samples.keys() | self._segments.keys()
        if headless := sorted(with_parts - self._heads.keys()):
            raise BadAnswer(
                f"the stream has samples of the groups {headless}, but no group records of them"
            )
        return tuple(
            group_of(head, self._samples[index], self._segments_with_kv(index))
            for index, head in sorted(self._heads.items())
        )

    def _segments_with_kv(self, index: int) -> list[Segment]:
        kv_records = self._kv[index]
        return [
            replace(each, kv=kv_records[each.id].kv, kv_reason=kv_records[each.id].kv_reason)
            if each.id in kv_records
            else each
            for each in self._segments[index]
        ]

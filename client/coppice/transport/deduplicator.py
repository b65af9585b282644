"""Deduplication of stream records after a reconnect."""

from coppice.errors import BadAnswer, RolloutLost
from coppice.wire.records import (
    EndRecord,
    GroupRecord,
    KvRecord,
    ProgressRecord,
    Record,
    SampleRecord,
    SegmentRecord,
    StartRecord,
)

RecordKey = tuple[str, int, int | str]


class RecordDeduplicator:
    """Delivered records of one rollout, over any number of connections.

    Every connection starts with the rollout's first record. Progress records are not replayed; they
    are passed on once the replay has reached new records.
    """

    def __init__(self) -> None:
        self.rollout_id: str | None = None
        self.ended = False
        self._delivered: set[RecordKey] = set()
        self._num_to_replay = 0
        self._has_started = False

    def on_reconnect(self) -> None:
        """Must be called before every connection."""
        self._num_to_replay = len(self._delivered)
        self._has_started = False

    def is_new(self, record: Record) -> bool:
        self._check_beginning(record)
        if isinstance(record, ProgressRecord):
            return self._num_to_replay == 0
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
                raise RolloutLost(f"rollout {known} is forgotten; {record.id} began in its place")
            self._has_started = True
        if not self._has_started:
            raise BadAnswer("the stream lacks its first record")

    def _check_end(self) -> None:
        if self._num_to_replay > 0:
            raise RolloutLost(f"rollout {self.rollout_id} came again without all of its records")
        self.ended = True


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

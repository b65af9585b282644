"""Collector of a stream's records into a RolloutResult."""

from collections import defaultdict
from dataclasses import replace

from coppice.errors import BadAnswer, error_of
from coppice.results import Group, RolloutResult, group_of, sample_of, segment_of
from coppice.samples import Sample
from coppice.tree import Segment
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
from coppice.wire.rollouts import GroupHead


class Collector:
    """Collects the records of one stream.

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
            case ProgressRecord() | KvRecord():
                pass  # GroupRecord contains the group's own handle
            case EndRecord():
                self._end = record

    def result(self) -> RolloutResult:
        """Returns the result. Raises the rollout's problem if it failed as a whole."""
        if self._start is None or self._end is None:
            raise BadAnswer("the stream lacks its first or its last record")
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
            raise BadAnswer(f"the stream has samples of groups {headless}, but not the groups")
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

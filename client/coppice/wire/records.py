"""Records of a streamed rollout, one JSON object per line.

The first record contains the rollout's id, the last one its outcome. A stream without the last
record has failed.
"""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from coppice.wire.base import AnswerModel
from coppice.wire.kv import KvHandle, KvReason
from coppice.wire.problems import Problem
from coppice.wire.rollouts import GroupHead, Outcome, SampleAnswer, SegmentAnswer, Usage


class StartRecord(AnswerModel):
    """First record of a stream, with the id of the rollout."""

    type: Literal["start"] = "start"
    id: str


class SampleRecord(AnswerModel):
    type: Literal["sample"] = "sample"
    group: int
    sample: SampleAnswer


class SegmentRecord(AnswerModel):
    """A segment of a tree; its parent was sent before."""

    type: Literal["segment"] = "segment"
    group: int
    segment: SegmentAnswer


class GroupRecord(AnswerModel):
    type: Literal["group"] = "group"
    group: GroupHead


class KvRecord(AnswerModel):
    """A group's prompt KV, sent when it is readable, which is long before its samples end.

    With `segment` it is the KV of the path to the end of that segment, or the reason why there is
    none.
    """

    type: Literal["kv"] = "kv"
    group: int
    segment: str | None = None
    kv: KvHandle | None = None
    kv_reason: KvReason | None = None


class ProgressRecord(AnswerModel):
    """Sent at least every 15 s, so that a long sample is not mistaken for a dead connection."""

    type: Literal["progress"] = "progress"
    samples: int
    samples_done: int


class EndRecord(AnswerModel):
    """Last record of a stream, with the outcome of the rollout."""

    type: Literal["end"] = "end"
    outcome: Outcome
    usage: Usage
    problem: Problem | None = None


Record = Annotated[
    StartRecord
    | SampleRecord
    | SegmentRecord
    | KvRecord
    | GroupRecord
    | ProgressRecord
    | EndRecord,
    Field(discriminator="type"),
]
RECORD: TypeAdapter[Record] = TypeAdapter(Record)

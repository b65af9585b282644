"""The records of a streamed rollout, one JSON object a line.

The first names the rollout, the last carries its outcome; a stream that lacks it has failed.
"""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from coppice.wire.base import AnswerModel
from coppice.wire.kv import KvHandle, KvReason
from coppice.wire.problems import Problem
from coppice.wire.rollouts import GroupHead, Outcome, SampleAnswer, SegmentAnswer, Usage


class StartRecord(AnswerModel):
    type: Literal["start"] = "start"
    id: str


class SampleRecord(AnswerModel):
    type: Literal["sample"] = "sample"
    group: int
    sample: SampleAnswer


class SegmentRecord(AnswerModel):
    """A piece of a tree; its parent has come before it."""

    type: Literal["segment"] = "segment"
    group: int
    segment: SegmentAnswer


class GroupRecord(AnswerModel):
    type: Literal["group"] = "group"
    group: GroupHead


class KvRecord(AnswerModel):
    """A group's prompt KV, as soon as it can be read: long before its samples have ended.

    With a `segment` that of the path which ends there, or why there is none.
    """

    type: Literal["kv"] = "kv"
    group: int
    segment: str | None = None
    kv: KvHandle | None = None
    kv_reason: KvReason | None = None


class ProgressRecord(AnswerModel):
    """Sent at least every 15 s, so that neither side takes a long sample for a dead connection."""

    type: Literal["progress"] = "progress"
    samples: int
    samples_done: int


class EndRecord(AnswerModel):
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

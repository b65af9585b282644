"""Answers of a server, as wire objects."""

from coppice import (
    ActivationAnswer,
    EndRecord,
    GroupRecord,
    ProgressRecord,
    Record,
    SampleRecord,
    StartRecord,
    Usage,
    VersionAnswer,
    VersionSpan,
)
from coppice.wire.rollouts import GroupAnswer, GroupHead, RolloutAnswer, SampleAnswer

USAGE = Usage(num_prompt_tokens=7, num_generated_tokens=9, num_samples=3)


def sample(index: int) -> SampleAnswer:
    return SampleAnswer(
        index=index,
        token_ids=[5, 6, 7 + index],
        logprobs=[-0.5, -1.25, 0.0],
        text="a b c",
        finish_reason="stop",
        versions=[
            VersionSpan(version="v1", start=0, end=1),
            VersionSpan(version="v2", start=1, end=3),
        ],
    )


def head(index: int) -> GroupHead:
    return GroupHead(
        id=f"g{index}", index=index, outcome="done", num_prompt_tokens=4, num_cached_tokens=2
    )


ANSWER = RolloutAnswer(
    id="r1",
    outcome="done",
    groups=[
        GroupAnswer(**head(0).model_dump(), samples=[sample(0), sample(1)]),
        GroupAnswer(**head(1).model_dump(), samples=[sample(0)]),
    ],
    usage=USAGE,
)

RECORDS: list[Record] = [
    StartRecord(id="r1"),
    SampleRecord(group=1, sample=sample(0)),
    GroupRecord(group=head(1)),
    ProgressRecord(num_samples=3, num_samples_done=1),
    SampleRecord(group=0, sample=sample(1)),
    SampleRecord(group=0, sample=sample(0)),
    GroupRecord(group=head(0)),
    EndRecord(outcome="done", usage=USAGE),
]

LINES = [record.model_dump_json().encode() + b"\n" for record in RECORDS]

VERSION = VersionAnswer(version="v7", sequence=7, state="staged", num_bytes=100)

ACTIVATION = ActivationAnswer(
    version="v7",
    sequence=7,
    previous="v6",
    mode="wait",
    paused_seconds=0.5,
    samples_ended=0,
)

"""Formats of a rollout's result: NDJSON stream records, and one packed safetensors file.

A stream has one JSON object per line. The first record contains the rollout's id, the last one its
outcome. A stream without the last record has failed.

A packed result is a safetensors file with arrays as tensors and the rest as JSON metadata:

    token_ids  int32    [tokens]        per group its samples' tokens, then its segments'
    logprobs   float32  [tokens]        NaN in segments that were not sampled
    offsets    int64    [parts + 1]     part i owns offsets[i]:offsets[i + 1]
    entropy    float32  [tokens]        NaN where missing; absent if no token has any
    raw_logprobs     float32  [tokens]  absent if they were not requested
    support_lengths  uint32  [tokens]   bytes of each token's support; absent if there are none
    support_data     uint8   [bytes]    the supports (`wire/columns/support.py`), in sequence

`routed_experts` [positions, layers, experts per token] has the rows of all samples with experts.
`top_logprobs` and `given_logprobs`, if they were requested, are tables with a position per token.
A table NAME has three tensors; position i owns NAME.offsets[i]:NAME.offsets[i + 1] of the others:

    NAME.offsets    int64    [positions + 1]
    NAME.token_ids  int32    [entries]
    NAME.logprobs   float32  [entries]

The table `prompt_logprobs.top_logprobs` has a position per prompt token after the first of each
group that has prompt logprobs, and `prompt_logprobs.logprobs` these tokens' own logprobs.
The metadata's `answer` is the RolloutAnswer with these arrays empty. A token takes about 25 bytes
as JSON and 8 bytes here.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, TypeAdapter
from safetensors.numpy import save

from coppice.safetensors_io import load_arrays, parse_header
from coppice.wire.base import AnswerModel
from coppice.wire.columns.kinds import NO_ENTRIES, Tables, Tensors, split, tables_of
from coppice.wire.columns.logprobs import PromptLogprobs
from coppice.wire.columns.token_columns import (
    TokenArrays,
    column_tensors,
    columns_of_tensors,
    without_tensors,
)
from coppice.wire.columns.weights_version_spans import VersionSpan
from coppice.wire.problem_catalogue import Problem
from coppice.wire.prompt_kv import KvHandle, KvReason
from coppice.wire.rollouts import (
    GroupAnswer,
    GroupHead,
    Outcome,
    RolloutAnswer,
    SampleAnswer,
    SegmentAnswer,
    Usage,
)

Part = SampleAnswer | SegmentAnswer
PROMPT, PROMPT_TOP = "prompt_logprobs.logprobs", "prompt_logprobs.top_logprobs"


class StartRecord(AnswerModel):
    """First record of a rollout stream, with the id of the rollout."""

    type: Literal["start"] = "start"
    id: str


class SampleRecord(AnswerModel):
    """Record of a rollout stream with a finished sample and the index of its group."""

    type: Literal["sample"] = "sample"
    group: int
    sample: SampleAnswer


class TokensRecord(AnswerModel):
    """Record of a rollout stream with new tokens of a sample, if `stream_tokens` was requested.

    `start` is the index of the first one in the sample's token ids. Indices in `versions` start at
    this token. A sample has any number of these records, in order, before its own. Together they
    have every token that the rollout has sampled.
    """

    type: Literal["tokens"] = "tokens"
    group: int
    index: int
    start: int
    token_ids: list[int]
    logprobs: list[float]
    versions: list[VersionSpan]


class SegmentRecord(AnswerModel):
    """Record of a rollout stream with a tree segment; the parent segment was sent before."""

    type: Literal["segment"] = "segment"
    group: int
    segment: SegmentAnswer


class GroupRecord(AnswerModel):
    """Record of a rollout stream for an ended group; its samples were sent before."""

    type: Literal["group"] = "group"
    group: GroupHead


class KvRecord(AnswerModel):
    """Record of a rollout stream with a group's prompt KV, sent long before the samples end.

    With `segment` it is the KV of the path to the end of that segment, or the reason why there is
    none.
    """

    type: Literal["kv"] = "kv"
    group: int
    segment: str | None = None
    kv: KvHandle | None = None
    kv_reason: KvReason | None = None


class ProgressRecord(AnswerModel):
    """Record of a rollout stream, sent at least every 15 s to show that the connection is alive."""

    type: Literal["progress"] = "progress"
    num_samples: int
    num_samples_done: int


class EndRecord(AnswerModel):
    """Last record of a rollout stream, with the outcome of the rollout."""

    type: Literal["end"] = "end"
    outcome: Outcome
    usage: Usage
    problem: Problem | None = None


Record = Annotated[
    StartRecord
    | TokensRecord
    | SampleRecord
    | SegmentRecord
    | KvRecord
    | GroupRecord
    | ProgressRecord
    | EndRecord,
    Field(discriminator="type"),
]
RECORD: TypeAdapter[Record] = TypeAdapter(Record)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Packed rollout result: the answer without its columns, and those of each part in order."""

    answer: RolloutAnswer
    columns: list[TokenArrays]


def parts_of(answer: RolloutAnswer) -> Iterator[Part]:
    """Samples and segments of a rollout, in the order of a packed result's arrays."""
    for group in answer.groups:
        yield from group.samples
        yield from group.segments or ()


def pack(answer: RolloutAnswer) -> bytes:
    tensors = column_tensors(list(parts_of(answer))) | _prompt_tensors(answer.groups)
    bare = answer.model_copy(update={"groups": [_bare_group(group) for group in answer.groups]})
    data: bytes = save(tensors, metadata={"answer": bare.model_dump_json()})
    return data


def unpack(data: bytes) -> Packed:
    """Parses a packed rollout result. Raises ValueError if the bytes are invalid."""
    tensors, metadata = load_arrays(data), parse_header(data).metadata
    try:
        answer = RolloutAnswer.model_validate_json(metadata["answer"])
        groups = list(_with_prompts(answer.groups, tensors))
        return Packed(
            answer=answer.model_copy(update={"groups": groups}),
            columns=columns_of_tensors(list(parts_of(answer)), tensors),
        )
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"the file lacks a part of the result: {error}") from error


def _bare_group(group: GroupAnswer) -> GroupAnswer:
    """Copy of a group with empty arrays; what is missing stays missing."""
    segments = group.segments and [without_tensors(segment) for segment in group.segments]
    update: dict[str, Any] = {"samples": [without_tensors(sample) for sample in group.samples]}
    if group.prompt_logprobs is not None:
        empty = {"logprobs": np.zeros(0, np.float32), "top_logprobs": NO_ENTRIES}
        update["prompt_logprobs"] = group.prompt_logprobs.model_copy(update=empty)
    return group.model_copy(update={**update, "segments": segments})


def _prompt_tensors(groups: Iterable[GroupAnswer]) -> Tensors:
    found = [group.prompt_logprobs for group in groups if group.prompt_logprobs is not None]
    if not found:
        return {}
    lengths = [len(prompt.logprobs) for prompt in found]
    return {
        PROMPT: np.concatenate([prompt.logprobs for prompt in found]),
        **Tables().tensors(PROMPT_TOP, [prompt.top_logprobs for prompt in found], lengths),
    }


def _with_prompts(groups: Iterable[GroupAnswer], tensors: Tensors) -> Iterator[GroupAnswer]:
    groups = list(groups)
    having = [group for group in groups if group.prompt_logprobs is not None]
    lengths = [group.num_prompt_tokens - 1 for group in having]
    tables = tables_of(PROMPT_TOP, tensors, lengths)
    own = tensors.get(PROMPT, np.zeros(sum(lengths), np.float32))
    logprobs = iter(split(PROMPT, own, lengths))
    for group in groups:
        prompt = group.prompt_logprobs
        if prompt is not None:
            filled = PromptLogprobs(
                logprobs=next(logprobs), top_logprobs=next(tables), version=prompt.version
            )
            group = group.model_copy(update={"prompt_logprobs": filled})
        yield group

"""Transfer formats of a rollout's result: a stream of records, or one packed file.

A stream has one JSON object per line. The first record contains the rollout's id, the last one its
outcome. A stream without the last record has failed.

A packed result is a safetensors file with arrays as tensors and the rest as JSON metadata:

    token_ids  int32    [tokens]        per group its samples' tokens, then its segments'
    logprobs   float32  [tokens]        NaN in segments that were not sampled
    offsets    int64    [parts + 1]     part i owns offsets[i]:offsets[i + 1]
    entropy    float32  [tokens]        NaN where missing; absent if no token has any
    raw_logprobs     float32  [tokens]  absent if they were not requested
    support_lengths  uint32  [tokens]   bytes of each token's support; absent if there are none
    support_data     uint8   [bytes]    the supports (`coppice.wire.support`), one after another

`routed_experts` [positions, layers, experts per token] has the rows of all samples with experts.
Requested logprobs of further tokens have tensors as described in `packed_tables`.
The metadata's `answer` is the RolloutAnswer with these arrays empty. A token takes about 25 bytes
as JSON and 8 bytes here.
"""

from base64 import b64decode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, TypeAdapter
from safetensors.numpy import save

from coppice.safetensors_io import load_arrays, parse_header
from coppice.wire.base import AnswerModel
from coppice.wire.kv import KvHandle, KvReason
from coppice.wire.packed_tables import (
    part_tensors,
    prompt_tensors,
    with_tables,
    without_tables,
)
from coppice.wire.problem_catalogue import Problem
from coppice.wire.rollouts import (
    GroupAnswer,
    GroupHead,
    Outcome,
    RolloutAnswer,
    SampleAnswer,
    SegmentAnswer,
    Usage,
    VersionSpan,
)
from coppice.wire.routed_experts import EXPERTS, expert_tensors, with_data, without_data

Part = SampleAnswer | SegmentAnswer
_NAMES = ("token_ids", "logprobs", "offsets")
_OPTIONAL = ("entropy", "support_lengths", "support_data")


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
    """Packed rollout result, in which the arrays of all samples and segments are concatenated."""

    answer: RolloutAnswer
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    offsets: npt.NDArray[np.int64]
    entropy: npt.NDArray[np.float32] | None = None
    support_lengths: npt.NDArray[np.uint32] | None = None
    support_data: npt.NDArray[np.uint8] | None = None


def parts_of(answer: RolloutAnswer) -> Iterator[Part]:
    """Samples and segments of a rollout, in the order of a packed result's arrays."""
    for group in answer.groups:
        yield from group.samples
        yield from group.segments or ()


def pack(answer: RolloutAnswer) -> bytes:
    parts = list(parts_of(answer))
    lengths = [len(part.token_ids) for part in parts]
    tensors: dict[str, npt.NDArray[Any]] = {
        "token_ids": _joined(parts, lambda part: part.token_ids, np.dtype(np.int32)),
        "logprobs": _joined(parts, _logprobs_or_nan, np.dtype(np.float32)),
        "offsets": np.cumsum([0, *lengths], dtype=np.int64),
        **part_tensors(parts, lengths),
        **prompt_tensors(answer.groups),
        **expert_tensors([sample.routed_experts for g in answer.groups for sample in g.samples]),
    }
    if any(_entropy(part) is not None for part in parts):
        tensors["entropy"] = _joined(parts, _entropy_or_nan, np.dtype(np.float32))
    if any(part.support is not None for part in parts):
        tensors["support_lengths"] = _joined(parts, _support_lengths, np.dtype(np.uint32))
        tensors["support_data"] = np.concatenate([_support_data(part) for part in parts])
    metadata = {"answer": _stripped(answer).model_dump_json()}
    data: bytes = save(tensors, metadata=metadata)
    return data


def unpack(data: bytes) -> Packed:
    """Parses a packed rollout result. Raises ValueError if the bytes are invalid."""
    tensors, metadata = load_arrays(data), parse_header(data).metadata
    try:
        answer = RolloutAnswer.model_validate_json(metadata["answer"])
        arrays = {name: tensors[name] for name in _NAMES}
        answer = with_tables(answer, tensors, np.diff(arrays["offsets"]).tolist())
        answer = _with_experts(answer, tensors)
        more: dict[str, Any] = {name: tensors.get(name) for name in _OPTIONAL}
        return Packed(answer=answer, **arrays, **more)
    except (KeyError, TypeError) as error:
        raise ValueError(f"the file lacks a part of the result: {error}") from error


def _support_lengths(part: Part) -> list[int]:
    return [0] * len(part.token_ids) if part.support is None else part.support.lengths


def _support_data(part: Part) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b64decode(part.support.data if part.support else ""), np.uint8)


def _with_experts(answer: RolloutAnswer, tensors: dict[str, npt.NDArray[Any]]) -> RolloutAnswer:
    if EXPERTS not in tensors:
        return answer
    rows, start = tensors[EXPERTS], 0

    def filled(sample: SampleAnswer) -> SampleAnswer:
        nonlocal start
        if sample.routed_experts is None:
            return sample
        begin, start = start, start + sample.routed_experts.shape[0]
        experts = with_data(sample.routed_experts, rows[begin:start])
        return sample.model_copy(update={EXPERTS: experts})

    groups = [
        group.model_copy(update={"samples": [filled(sample) for sample in group.samples]})
        for group in answer.groups
    ]
    return answer.model_copy(update={"groups": groups})


def _entropy(part: Part) -> list[float] | None:
    return part.entropy if isinstance(part, SegmentAnswer) else None


def _logprobs_or_nan(part: Part) -> list[float]:
    is_context = isinstance(part, SegmentAnswer) and not part.sampled
    return [float("nan")] * len(part.token_ids) if is_context else part.logprobs


def _entropy_or_nan(part: Part) -> list[float]:
    return _entropy(part) or [float("nan")] * len(part.token_ids)


def _joined(
    parts: list[Part],
    values: Callable[[Part], list[int] | list[float]],
    dtype: npt.DTypeLike,
) -> npt.NDArray[np.generic]:
    return np.concatenate([np.empty(0, dtype), *(np.asarray(values(p), dtype) for p in parts)])


def _stripped(answer: RolloutAnswer) -> RolloutAnswer:
    return answer.model_copy(update={"groups": [_stripped_group(g) for g in answer.groups]})


def _stripped_group(group: GroupAnswer) -> GroupAnswer:
    """Copy of a group with empty arrays; entropy that was present becomes empty, not None."""
    group = without_tables(group)
    samples = [_stripped_sample(sample) for sample in group.samples]
    segments = None if group.segments is None else [_stripped_segment(s) for s in group.segments]
    return group.model_copy(update={"samples": samples, "segments": segments})


def _stripped_sample(sample: SampleAnswer) -> SampleAnswer:
    experts = None if sample.routed_experts is None else without_data(sample.routed_experts)
    return sample.model_copy(update={**_bare(sample), EXPERTS: experts})


def _stripped_segment(segment: SegmentAnswer) -> SegmentAnswer:
    entropy = None if segment.entropy is None else list[float]()
    return segment.model_copy(update={**_bare(segment), "entropy": entropy})


def _bare(part: Part) -> dict[str, object]:
    """Empty arrays of a part; a support keeps the size of the vocabulary."""
    support = part.support
    if support is not None:
        support = support.model_copy(update={"lengths": [], "data": ""})
    return {"token_ids": [], "logprobs": [], "support": support}

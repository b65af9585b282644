"""Packed rollout result: one safetensors file with arrays as tensors, the rest as JSON metadata.

    token_ids  int32    [tokens]        per group its samples' tokens, then its segments'
    logprobs   float32  [tokens]
    offsets    int64    [parts + 1]     part i owns offsets[i]:offsets[i + 1]
    entropy    float32  [tokens]        NaN where missing; absent if no token has any

The metadata's `answer` is the RolloutAnswer with these arrays empty. A token takes about 25 bytes
as JSON and 8 bytes here.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from coppice.wire.rollouts import GroupAnswer, RolloutAnswer, SampleAnswer, SegmentAnswer

MEDIA_TYPE = "application/vnd.coppice.safetensors"

Part = SampleAnswer | SegmentAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A result with the arrays of all samples and segments concatenated."""

    answer: RolloutAnswer
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    offsets: npt.NDArray[np.int64]
    entropy: npt.NDArray[np.float32] | None = None


def parts_of(answer: RolloutAnswer) -> Iterator[Part]:
    """Samples and segments in the order of their arrays."""
    for group in answer.groups:
        yield from group.samples
        yield from group.segments or ()


def pack(answer: RolloutAnswer) -> bytes:
    parts = list(parts_of(answer))
    lengths = [len(part.token_ids) for part in parts]
    tensors = {
        "token_ids": _joined(parts, lambda part: part.token_ids, np.dtype(np.int32)),
        "logprobs": _joined(parts, lambda part: part.logprobs, np.dtype(np.float32)),
        "offsets": np.cumsum([0, *lengths], dtype=np.int64),
    }
    if any(_entropy(part) is not None for part in parts):
        tensors["entropy"] = _joined(parts, _entropy_or_nan, np.dtype(np.float32))
    metadata = {"answer": _stripped(answer).model_dump_json()}
    data: bytes = save(tensors, metadata=metadata)
    return data


def unpack(data: bytes) -> Packed:
    """Parses a packed result. Raises ValueError if the bytes are not one."""
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise ValueError(f"no safetensors file: {error}") from error
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    try:
        answer = RolloutAnswer.model_validate_json(header["__metadata__"]["answer"])
        arrays = {name: tensors[name] for name in _NAMES}
        return Packed(answer=answer, **arrays, entropy=tensors.get("entropy"))
    except (KeyError, TypeError) as error:
        raise ValueError(f"the file lacks a part of an answer: {error}") from error


_NAMES = ("token_ids", "logprobs", "offsets")


def _entropy(part: Part) -> list[float] | None:
    return part.entropy if isinstance(part, SegmentAnswer) else None


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
    """Empties the arrays; entropy that was present becomes empty, not None."""
    bare: dict[str, list[int]] = {"token_ids": [], "logprobs": []}
    samples = [sample.model_copy(update=bare) for sample in group.samples]
    segments = None if group.segments is None else [_stripped_segment(s) for s in group.segments]
    return group.model_copy(update={"samples": samples, "segments": segments})


def _stripped_segment(segment: SegmentAnswer) -> SegmentAnswer:
    entropy = None if segment.entropy is None else list[float]()
    return segment.model_copy(update={"token_ids": [], "logprobs": [], "entropy": entropy})

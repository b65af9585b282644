"""A rollout's answer as one safetensors file: arrays as tensors, the rest as JSON in its metadata.

    token_ids  int32    [tokens]        every sample's tokens, group by group, sample by sample
    logprobs   float32  [tokens]
    offsets    int64    [samples + 1]   sample i owns offsets[i]:offsets[i + 1]

The metadata's `answer` is the RolloutAnswer with empty token_ids and logprobs. A token takes some
twenty-five bytes as JSON and eight here.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from coppice.wire.rollouts import RolloutAnswer, SampleAnswer

MEDIA_TYPE = "application/vnd.coppice.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """An answer whose samples' arrays lie side by side."""

    answer: RolloutAnswer
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    offsets: npt.NDArray[np.int64]


def pack(answer: RolloutAnswer) -> bytes:
    samples = [sample for group in answer.groups for sample in group.samples]
    lengths = [len(sample.token_ids) for sample in samples]
    tensors = {
        "token_ids": _joined(samples, lambda sample: sample.token_ids, np.dtype(np.int32)),
        "logprobs": _joined(samples, lambda sample: sample.logprobs, np.dtype(np.float32)),
        "offsets": np.cumsum([0, *lengths], dtype=np.int64),
    }
    metadata = {"answer": _stripped(answer).model_dump_json()}
    data: bytes = save(tensors, metadata=metadata)
    return data


def unpack(data: bytes) -> Packed:
    """ValueError if these bytes are no packed answer."""
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise ValueError(f"no safetensors file: {error}") from error
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    try:
        answer = RolloutAnswer.model_validate_json(header["__metadata__"]["answer"])
        return Packed(answer=answer, **{name: tensors[name] for name in _NAMES})
    except (KeyError, TypeError) as error:
        raise ValueError(f"the file lacks a part of an answer: {error}") from error


_NAMES = ("token_ids", "logprobs", "offsets")


def _joined(
    samples: list[SampleAnswer],
    part: Callable[[SampleAnswer], list[int] | list[float]],
    dtype: npt.DTypeLike,
) -> npt.NDArray[np.generic]:
    return np.concatenate([np.empty(0, dtype), *(np.asarray(part(s), dtype) for s in samples)])


def _stripped(answer: RolloutAnswer) -> RolloutAnswer:
    bare: dict[str, list[int]] = {"token_ids": [], "logprobs": []}
    groups = [
        group.model_copy(update={"samples": [s.model_copy(update=bare) for s in group.samples]})
        for group in answer.groups
    ]
    return answer.model_copy(update={"groups": groups})

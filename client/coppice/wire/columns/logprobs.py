"""Wire types of logprobs of the top k or of given token ids, per token of samples and prompts."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    Field,
    PlainSerializer,
    PlainValidator,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapSerializer,
    WrapValidator,
    model_validator,
)

from coppice.wire.base import AnswerModel, JsonInteger, TokenId
from coppice.wire.packed.requests import LOGPROBS, given_list, serialized_list

MAX_TOP_LOGPROBS = 1024
NumTopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), JsonInteger()]
PositionTokenIds = Annotated[
    list[TokenId], Field(min_length=1, max_length=MAX_TOP_LOGPROBS, fail_fast=True)
]
"""Tokens whose logprobs to return at one position."""


def _array(dtype: type[np.generic], json_type: str) -> Any:
    """Annotations of a one-dimensional array that is a list in JSON."""

    def validate(value: Any) -> NDArray[Any]:
        array = np.asarray(value, dtype)
        if array.ndim != 1:
            raise ValueError("must be a list of numbers")
        return array

    return (
        PlainValidator(validate),
        PlainSerializer(lambda array: array.tolist(), when_used="json"),
        WithJsonSchema({"type": "array", "items": {"type": json_type}}),
    )


Logprob = Annotated[float, Field(le=0.0, allow_inf_nan=False)]


def _validate_logprobs(
    value: Any, validate: ValidatorFunctionWrapHandler, info: ValidationInfo
) -> list[float]:
    found = given_list(LOGPROBS, value, info)
    logprobs: list[float] = validate(found.tolist() if isinstance(found, np.ndarray) else found)
    return logprobs


def _serialize_logprobs(
    value: Any, handler: SerializerFunctionWrapHandler, info: SerializationInfo
) -> Any:
    return serialized_list(LOGPROBS, value, handler, info)


Logprobs = Annotated[
    list[Logprob],
    Field(fail_fast=True),
    WrapValidator(_validate_logprobs),
    WrapSerializer(_serialize_logprobs),
]


Offsets = Annotated[NDArray[np.int64], *_array(np.int64, "integer")]
TokenIdArray = Annotated[NDArray[np.int32], *_array(np.int32, "integer")]
LogprobArray = Annotated[NDArray[np.float32], *_array(np.float32, "number")]


class TokenLogprobs(AnswerModel):
    """Logprobs of several tokens at each position.

    Position i has entries offsets[i] to offsets[i + 1] of `token_ids` and `logprobs`. Positions may
    have different numbers of entries.
    """

    offsets: Offsets
    token_ids: TokenIdArray
    logprobs: LogprobArray

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        offsets, num_entries = self.offsets, len(self.token_ids)
        if not len(offsets) or offsets[0] != 0 or (np.diff(offsets) < 0).any():
            raise ValueError("the offsets do not ascend from 0")
        if offsets[-1] != num_entries or num_entries != len(self.logprobs):
            raise ValueError("the offsets do not match the entries")
        return self

    @property
    def num_positions(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_bytes(self) -> int:
        return self.offsets.nbytes + self.token_ids.nbytes + self.logprobs.nbytes

    def at(self, position: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Token ids and logprobs at one position."""
        start, end = self.offsets[position : position + 2]
        return self.token_ids[start:end], self.logprobs[start:end]

    def padded(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Token ids and logprobs as arrays [positions, entries].

        Positions with fewer entries are padded with token 0 at minus infinity.
        """
        lengths = np.diff(self.offsets)
        is_entry = np.arange(lengths.max(initial=0)) < lengths[:, None]
        token_ids = np.zeros(is_entry.shape, np.int64)
        logprobs = np.full(is_entry.shape, -np.inf, np.float32)
        token_ids[is_entry], logprobs[is_entry] = self.token_ids, self.logprobs
        return token_ids, logprobs

    def part(self, start: int, end: int) -> "TokenLogprobs":
        """Positions start to end (exclusive)."""
        offsets = self.offsets[start : end + 1]
        entries = slice(offsets[0], offsets[-1])
        return TokenLogprobs(
            offsets=offsets - offsets[0],
            token_ids=self.token_ids[entries],
            logprobs=self.logprobs[entries],
        )

    @staticmethod
    def empty(num_positions: int) -> "TokenLogprobs":
        """Positions without entries."""
        return TokenLogprobs(
            offsets=np.zeros(num_positions + 1, np.int64),
            token_ids=np.zeros(0, np.int32),
            logprobs=np.zeros(0, np.float32),
        )

    @staticmethod
    def joined(parts: Iterable["TokenLogprobs"]) -> "TokenLogprobs":
        """Positions of several parts, one after the other."""
        found = [TokenLogprobs.empty(0), *parts]
        lengths = np.concatenate([np.diff(part.offsets) for part in found])
        return TokenLogprobs(
            offsets=np.concatenate([[0], np.cumsum(lengths)]),
            token_ids=np.concatenate([part.token_ids for part in found]),
            logprobs=np.concatenate([part.logprobs for part in found]),
        )

    def split(self, num_positions: Iterable[int]) -> Iterator["TokenLogprobs"]:
        """Inverse of `joined`."""
        start = 0
        for number in num_positions:
            yield self.part(start, start + number)
            start += number


class PromptLogprobs(AnswerModel):
    """Logprobs of a prompt's tokens after the first one, computed on one weights version.

    Entry i belongs to prompt token i + 1.
    """

    logprobs: LogprobArray
    top_logprobs: TokenLogprobs
    version: str


OptionalLogprobs = Annotated[TokenLogprobs | None, Field(exclude_if=lambda value: value is None)]
"""In answers: absent if it was not requested."""
OptionalPromptLogprobs = Annotated[
    PromptLogprobs | None, Field(exclude_if=lambda value: value is None)
]

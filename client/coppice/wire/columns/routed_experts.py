"""Wire type of the experts that a mixture-of-experts model selected for each token."""

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema, model_validator

from coppice.wire.base import AnswerModel

MAX_DIMENSION = 2**24


def _decoded(value: Any) -> Any:
    return base64.b64decode(value, validate=True) if isinstance(value, str) else value


Base64Data = Annotated[
    bytes,
    BeforeValidator(_decoded),
    PlainSerializer(lambda data: base64.b64encode(data).decode(), when_used="json"),
    WithJsonSchema({"type": "string"}),
]
Dimension = Annotated[int, Field(ge=0, le=MAX_DIMENSION)]


class RoutedExperts(AnswerModel):
    """Experts that each layer selected for each token that the model has read.

    Row i belongs to position `start` + i, counted from the prompt's first token. The last token of
    a sample has no row, because the model has not read it. `data` has the row-major values of the
    shape [positions, layers, experts per token]. Layers without experts have zeros.
    """

    start: Annotated[int, Field(ge=0)]
    shape: tuple[Dimension, Dimension, Dimension]
    dtype: Literal["uint8", "uint16"]
    data: Base64Data

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        num_values = self.shape[0] * self.shape[1] * self.shape[2]
        if self.data and len(self.data) != num_values * np.dtype(self.dtype).itemsize:
            raise ValueError("the data does not match the shape")
        return self

    @classmethod
    def of(cls, start: int, experts: NDArray[Any]) -> "RoutedExperts":
        positions, layers, per_token = experts.shape
        name: Literal["uint8", "uint16"] = "uint8" if experts.dtype.itemsize == 1 else "uint16"
        return cls(
            start=start,
            shape=(positions, layers, per_token),
            dtype=name,
            data=np.ascontiguousarray(experts).tobytes(),
        )

    @property
    def array(self) -> NDArray[np.integer[Any]]:
        """Experts as an array [positions, layers, experts per token]."""
        return np.frombuffer(self.data, np.dtype(self.dtype)).reshape(self.shape)

    @staticmethod
    def joined(parts: Sequence["RoutedExperts"]) -> "RoutedExperts":
        """Experts of a sample that was resumed, from those of its consecutive parts."""
        for before, behind in zip(parts, parts[1:], strict=False):
            if before.start + before.shape[0] != behind.start:
                raise ValueError("the parts are not consecutive")
        return RoutedExperts.of(parts[0].start, np.concatenate([part.array for part in parts]))


OptionalExperts = Annotated[RoutedExperts | None, Field(exclude_if=lambda value: value is None)]
"""In answers: absent if it was not requested."""

"""Base class and common field types of all settings classes, also the service's.

A field is written `name: Type = Field(default, description="...")`. A constraint that only one
field has is an argument of its `Field`.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Bytes = Annotated[int, Field(ge=0)]
BufferBytes = Annotated[int, Field(ge=2**20)]
"""Size of a memory area, at least 1 MiB."""
Seconds = Annotated[float, Field(gt=0)]
SecondsOrZero = Annotated[float, Field(ge=0)]
Ratio = Annotated[float, Field(ge=0, le=1)]
Port = Annotated[int, Field(ge=0, le=65535)]


def parse_off(value: object) -> object:
    """Undo YAML's conversion of the word `off` to false."""
    return "off" if value is False else value


class Section(BaseModel):
    """Base class of a section of the settings; immutable, rejects unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

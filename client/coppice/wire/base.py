"""What every wire type shares: requests refuse what they do not know, answers tolerate it."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
"""The first wrong one is named; a million would take longer to list than to refuse."""
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""A weights version as its publisher names it: safe as a file name and in a URL."""
AdapterName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}(@[A-Za-z0-9][A-Za-z0-9._-]{0,63})?$")
]
"""An adapter's name, for its current version, or `name@version`, for no other."""
AdapterLabel = Annotated[str | None, Field(exclude_if=lambda label: label is None)]
"""In answers: `name@version`, or nothing where no adapter was."""


class RequestModel(BaseModel):
    """A body that a caller sends. A misspelt sampling field must fail, not change the training."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class AnswerModel(BaseModel):
    """A body that the server sends. Newer servers may add fields."""

    model_config = ConfigDict(extra="ignore", frozen=True)

"""Weights versions: staged by upload or by path, then activated."""

from typing import Annotated, Literal

from pydantic import Field

from coppice.wire.base import AnswerModel, RequestModel

VersionState = Literal["incomplete", "staged", "active", "superseded"]
ActivationMode = Literal["keep", "recompute", "wait", "abort"]
Sequence = Annotated[int, Field(ge=0, lt=2**53)]


class StageRequest(RequestModel):
    """Weights that already lie in one of the server's configured directories."""

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    sequence: Sequence | None = None


class ActivateRequest(RequestModel):
    """How running samples live through it: kept, their cache recomputed, awaited, or ended."""

    mode: ActivationMode = "keep"
    allow_rollback: bool = False


class VersionAnswer(AnswerModel):
    """One known weights version."""

    version: str
    sequence: int
    state: VersionState
    num_bytes: int
    sha256: str | None = None
    missing_files: list[str] = []


class ActivationAnswer(AnswerModel):
    """What an activation did and how long samples stood still."""

    version: str
    sequence: int
    previous: str
    mode: ActivationMode
    paused_seconds: float
    samples_ended: int


class VersionsAnswer(AnswerModel):
    """Every known version; the active one is named."""

    active: str
    versions: list[VersionAnswer]

"""Weights versions: staged by upload or by path, then activated."""

from typing import Annotated, Literal

from pydantic import Field

from coppice.wire.base import AnswerModel, JsonInteger, RequestModel

VersionState = Literal["incomplete", "staged", "active", "superseded"]
ActivationMode = Literal["keep", "recompute", "wait", "abort"]
Sequence = Annotated[int, Field(ge=0, lt=2**53), JsonInteger()]


class StageRequest(RequestModel):
    """Weights that already lie in one of the server's configured directories."""

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    sequence: Sequence | None = None


class ActivateRequest(RequestModel):
    """How running samples live through it: kept, their cache recomputed, awaited, or ended."""

    mode: ActivationMode = "keep"
    allow_rollback: bool = False


class VersionAnswer(AnswerModel):
    """One known weights version. `base`: what it came here as a delta of; `received_bytes`: how
    many it came in."""

    version: str
    sequence: int
    state: VersionState
    num_bytes: int
    received_bytes: int = 0
    base: str | None = None
    sha256: str | None = None
    missing_files: list[str] = []


class ActivationAnswer(AnswerModel):
    """What an activation did here and how long samples stood still; `behind` are replicas that do
    not serve it yet."""

    version: str
    sequence: int
    previous: str
    mode: ActivationMode
    paused_seconds: float
    samples_ended: int
    behind: list[str] = []


class ReplicaWeights(AnswerModel):
    """One replica of the fleet: what it serves, by how much what all are to serve is newer, what it
    could serve at once, and what it could not bring itself to serve."""

    replica: str
    state: Literal["starting", "serving", "draining"]
    version: str
    sequence: int
    behind: int
    staged: list[str]
    failed: str | None = None
    error: str | None = None


class VersionsAnswer(AnswerModel):
    """Every version known here; the one that is active here, and the one that all are to serve."""

    active: str
    versions: list[VersionAnswer]
    ordered: str | None = None
    replicas: list[ReplicaWeights] = []

"""Wire types of weights versions, which are staged by upload or by path, then activated."""

from typing import Annotated, Literal

from pydantic import Field

from coppice.wire.base import AnswerModel, JsonInteger, RequestModel

VersionState = Literal["incomplete", "staged", "active", "superseded"]
ActivationMode = Literal["keep", "recompute", "wait", "abort"]
Sequence = Annotated[int, Field(ge=0, lt=2**53), JsonInteger()]


class StageRequest(RequestModel):
    """Weights that are already in one of the server's configured directories."""

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    sequence: Sequence | None = None


class ActivateRequest(RequestModel):
    """Handling of running samples: keep, recompute their KV, wait for them, or abort them."""

    mode: ActivationMode = "keep"
    allow_rollback: bool = False


class VersionAnswer(AnswerModel):
    """One weights version. `base` is the version of which it was received as a delta.

    `received_bytes` is the number of bytes transferred for it.
    """

    version: str
    sequence: int
    state: VersionState
    num_bytes: int
    received_bytes: int = 0
    base: str | None = None
    sha256: str | None = None
    missing_files: list[str] = []


class ActivationAnswer(AnswerModel):
    """Result of an activation on this server.

    `paused_seconds` is the time for which samples were paused. `behind` lists the replicas that do
    not serve the version yet.
    """

    version: str
    sequence: int
    previous: str
    mode: ActivationMode
    paused_seconds: float
    samples_ended: int
    behind: list[str] = []


class ReplicaWeights(AnswerModel):
    """Weights of one replica of the fleet.

    `behind` is the sequence of the fleet's target version minus that of the one served. `staged`
    versions can be activated at once. `failed` is the version that it could not fetch or activate.
    """

    replica: str
    state: Literal["starting", "serving", "draining"]
    version: str
    sequence: int
    behind: int
    staged: list[str]
    failed: str | None = None
    error: str | None = None


class VersionsAnswer(AnswerModel):
    """All versions on this server, its active version, and the fleet's target in `ordered`."""

    active: str
    versions: list[VersionAnswer]
    ordered: str | None = None
    replicas: list[ReplicaWeights] = []

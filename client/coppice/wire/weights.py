"""Wire types of weights versions, LoRA adapters and the draft model.

Weights versions are staged by upload or by path, then activated. Adapters are loaded or
uploaded, then used by rollouts.
"""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from coppice.wire.base import AnswerModel, JsonInteger, Label, RequestModel
from coppice.wire.columns.kv_version_spans import ActivationKv

VersionState = Literal["incomplete", "staged", "active", "superseded"]
ActivationMode = Literal["keep", "recompute", "wait", "abort"]
Sequence = Annotated[int, Field(ge=0, lt=2**53), JsonInteger()]
TrainingState = Literal["off", "running", "paused", "failed"]


class StageRequest(RequestModel):
    """Body of a request to stage weights that are on the server's host.

    `path` is in one of the server's configured directories. With a `fingerprint`, see
    `coppice.weights.checkpoint_files`, it is refused unless the server sees the same files there.
    """

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    fingerprint: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    sequence: Sequence | None = None


class ActivateRequest(RequestModel):
    """Body of a request to activate a weights version.

    `mode` decides about running samples: keep them, recompute their KV, wait for them, or abort
    them. With `kv: keep_running`, the KV of sessions and rollouts with `keep_kv` stays in the
    prefix cache, where only they find it; the rest of the prefix cache is reset in either case.
    """

    mode: ActivationMode = "keep"
    kv: Annotated[ActivationKv, Field(exclude_if=lambda kv: kv == "reset")] = "reset"
    allow_rollback: bool = False

    @field_validator("kv")
    @classmethod
    def _keeps_what_it_does_not_recompute(
        cls, kv: ActivationKv, found: ValidationInfo
    ) -> ActivationKv:
        if found.data.get("mode") == "recompute" and kv != "reset":
            raise ValueError("mode recompute drops all KV: leave out kv")
        return kv


class VersionAnswer(AnswerModel):
    """State of one weights version on a server.

    `base` is the version of which it was received as a delta.
    `received_bytes` is the number of bytes transferred for it.
    `xxh3_128` is the checksum of a version that was uploaded as one file; in the response to an
    upload, of the received file.
    `sha256` is its digest, once it was needed.
    `has_files` is false if it was handed over in GPU memory: it cannot be activated again.
    """

    version: str
    sequence: int
    state: VersionState
    num_bytes: int
    received_bytes: int = 0
    base: str | None = None
    sha256: str | None = None
    xxh3_128: str | None = None
    missing_files: list[str] = []
    has_files: bool = True


class ActivationAnswer(AnswerModel):
    """Result of the activation of a weights version on this server.

    `paused_seconds` is the time for which samples were paused. `pending_replicas` are
    replicas that do not serve the version yet. `num_kept_tokens` is the number of tokens whose KV
    stayed in the prefix cache, with `kv: keep_running`.
    """

    version: str
    sequence: int
    previous: str
    mode: ActivationMode
    paused_seconds: float
    samples_ended: int
    num_kept_tokens: int = 0
    pending_replicas: list[str] = []


class ReplicaWeights(AnswerModel):
    """Weights versions of one replica of the cluster.

    `versions_behind` is the sequence number of the cluster's target version minus the one served.
    `staged` versions can be activated at once. `failed` is the version that the replica could not
    fetch or activate.
    """

    replica: str
    state: Literal["starting", "serving", "draining"]
    version: str
    sequence: int
    versions_behind: int
    staged: list[str]
    failed: str | None = None
    error: str | None = None


class VersionsAnswer(AnswerModel):
    """Weights versions on this server, the active one, and `target_version` of the cluster."""

    active: str
    versions: list[VersionAnswer]
    target_version: str | None = None
    replicas: list[ReplicaWeights] = []


class LoadAdapterRequest(RequestModel):
    """Body of a request to load a LoRA adapter from one of the server's configured directories.

    Without a version the next unused one is assigned.
    """

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    version: Label | None = None


class AdapterAnswer(AnswerModel):
    """One loaded version of a LoRA adapter.

    New rollouts use the `current` version; other versions remain loaded for the rollouts that
    started with them.
    """

    name: str
    version: str
    current: bool
    rank: int
    num_bytes: int
    num_rollouts_running: int


class AdaptersAnswer(AnswerModel):
    """All loaded versions of LoRA adapters, and the maximum number and rank."""

    adapters: list[AdapterAnswer]
    max_adapters: int
    max_rank: int


class DrafterAcceptance(AnswerModel):
    """Acceptance counts of one draft model under one version of the served weights.

    `num_first_tokens_accepted` / `num_drafts` is the acceptance rate of the first token of each
    draft, which does not depend on the draft length.
    """

    drafter: str
    weights: str
    num_draft_tokens: int
    num_accepted_tokens: int
    num_drafts: int
    num_first_tokens_accepted: int


class DrafterTraining(AnswerModel):
    """State of the training of the draft model.

    `loss` is a recent average per token. `num_samples_dropped` counts samples that finished faster
    than they could be handed to the trainer.
    """

    state: TrainingState
    num_steps: int
    num_tokens: int
    loss: float
    num_samples_dropped: int


class DrafterAnswer(AnswerModel):
    """Answer of GET /v1/drafter as JSON: versions, acceptance and training of the draft model.

    `candidate` is in its trial on traffic, or waits for it. `acceptance` is ordered from the
    oldest to the latest. `num_promoted`, `num_rolled_back` and `num_failed` count trials by
    outcome.
    """

    serving: str
    candidate: str | None = None
    acceptance: list[DrafterAcceptance]
    num_promoted: int
    num_rolled_back: int
    num_failed: int
    training: DrafterTraining

"""Wire types of pause, resume, status and health."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from coppice.wire.base import AnswerModel, RequestModel
from coppice.wire.kv import KvReason

DEFAULT_PAUSE_LEASE_SECONDS = 120.0
DEFAULT_SLEEP_LEASE_SECONDS = 2.0**31 - 1
"""Lease that the server shortens to its maximum: a wake while a trainer uses the memory fails."""

PauseMode = Literal["abort", "wait", "keep"]
SleepLevel = Literal[1, 2]
SleepTag = Literal["kv_cache", "weights"]
SleepTags = Annotated[list[SleepTag], Field(min_length=1, max_length=2)]
PauseLease = Annotated[float, Field(gt=0, lt=2**31, allow_inf_nan=False)]
Stage = Literal["starting", "serving", "activating", "sleeping", "stopping", "dead"]


class PauseRequest(RequestModel):
    """Body of POST /v1/pause: running samples end (abort), finish (wait) or freeze (keep).

    The pause ends after `lease_seconds` unless it is repeated; None: only by a resume.
    """

    mode: PauseMode = "keep"
    lease_seconds: PauseLease | None = DEFAULT_PAUSE_LEASE_SECONDS


class ResumeRequest(RequestModel):
    """Body of POST /v1/resume; `all` also ends the pauses of other API keys."""

    all: bool = False


class PauseAnswer(AnswerModel):
    """Answer of POST /v1/pause and /v1/resume: the new state of sampling.

    `paused` is true while any API key pauses. `lease_seconds` is the time until the last pause ends
    by itself; None if sampling is not paused or a pause has no lease.
    """

    paused: bool
    lease_seconds: float | None = None


class SleepRequest(RequestModel):
    """Body of POST /v1/sleep: the memory to release, and the handling of running samples.

    Level 1 keeps the weights in host memory, level 2 drops them. The lease is that of a pause, but
    by default the longest that the server allows.
    """

    level: SleepLevel = 1
    tags: SleepTags = ["kv_cache", "weights"]
    mode: PauseMode = "keep"
    lease_seconds: PauseLease | None = DEFAULT_SLEEP_LEASE_SECONDS

    @field_validator("tags")
    @classmethod
    def _require_kv_cache(cls, tags: list[SleepTag]) -> list[SleepTag]:
        if "kv_cache" not in tags:
            raise ValueError("must include kv_cache, whose content depends on the weights")
        return tags


class WakeRequest(RequestModel):
    """Body of POST /v1/wake: the memory to allocate; `all`: also for a sleep of another API key."""

    tags: SleepTags = ["kv_cache", "weights"]
    all: bool = False


class SleepAnswer(AnswerModel):
    """Answer of POST /v1/sleep and /v1/wake: the new state of the engine.

    `level` is 0 if nothing is released. `paused` and `lease_seconds` are those of PauseAnswer.
    """

    level: Literal[0, 1, 2]
    sleeping_tags: list[SleepTag]
    paused: bool
    lease_seconds: float | None = None


class HealthAnswer(AnswerModel):
    """Answer of the health probes if they succeed; if they fail, it is a problem document."""

    status: Literal["ok"] = "ok"
    stage: Stage


class StartPhase(AnswerModel):
    """Current phase of a start, such as compiling, and how far it is, if that is known."""

    name: str
    seconds: float
    num_done: int | None = None
    num_total: int | None = None


class EngineStatus(AnswerModel):
    """Properties of the running inference engine, as reported by GET /v1/status."""

    model: str
    dtype: str
    device: Literal["cpu", "cuda"]
    block_size: int
    num_blocks: int
    kv_bytes_per_token: int
    max_context_tokens: int
    max_sequences: int
    vocab_size: int
    eos_token_ids: list[int]
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    cpu_threads: int | None
    vllm_version: str


class KvStatus(AnswerModel):
    """Use of the memory that holds prompt KV, as reported by GET /v1/status.

    `reason` explains why prompt KV is unavailable. The bytes are shared memory, and GPU memory per
    rank.
    """

    reason: KvReason | None
    capacity_bytes: int
    free_bytes: int
    reserved_bytes: int
    leased_bytes: int
    quarantined_bytes: int
    num_handles: int
    gpu_capacity_bytes: int = 0
    gpu_free_bytes: int = 0


class FeatureStatus(AnswerModel):
    """An optional feature of the server: whether it is on, why, and how to change that."""

    name: str
    enabled: bool
    reason: str
    how_to_change: str


class StatusAnswer(AnswerModel):
    """Answer of GET /v1/status: state of the server, its weights and its engine."""

    version: str
    stage: Stage
    start_phase: StartPhase | None = None
    paused: bool
    pause_lease_seconds: float | None = None
    sleep_level: Literal[0, 1, 2] = 0
    sleeping_tags: list[SleepTag] = Field(default_factory=list)
    weights_version: str
    weights_sequence: int
    num_rollouts_running: int
    num_samples_running: int
    uptime_seconds: float
    engine: EngineStatus | None
    kv: KvStatus | None = None
    features: list[FeatureStatus] = Field(default_factory=list)

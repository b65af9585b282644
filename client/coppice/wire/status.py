"""Wire types of GET /v1/status and of the health probes."""

from typing import Literal

from pydantic import Field

from coppice.wire.base import AnswerModel
from coppice.wire.pause import SleepTag
from coppice.wire.prompt_kv import KvReason

Stage = Literal["starting", "serving", "activating", "sleeping", "stopping", "dead"]


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

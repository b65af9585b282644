"""Data types of the engine interface: engine properties, start phases and health."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.types.feature_stats import FeatureStatus
from engine.types.kv import GpuMemory, KvFormat

EngineStage = Literal["starting", "serving", "activating", "sleeping", "stopping", "dead"]
KvReason = Literal["disabled", "unsupported_cache"]
KeptKvReason = Literal["prefix_caching_off", "kv_offloading", "unsupported_cache"]
"""Reason why no KV can be kept across weights updates.

prefix_caching_off: KV is kept in the prefix cache. kv_offloading: the versions of offloaded KV are
not known. unsupported_cache: the model has states of many positions, such as those of Mamba layers.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Properties of a running engine, constant from start to stop."""

    model: str
    """Served model name."""
    model_given: str
    """The `model` setting, possibly a path. Accepted in requests, never returned in responses."""
    model_path: Path
    dtype: str
    device: Literal["cpu", "cuda"]
    block_size: int
    num_blocks: int
    kv_bytes_per_token: int
    max_context_tokens: int
    max_sequences: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    """Number of engines. Each has `max_sequences` samples and its share of the `num_blocks`."""
    cpu_threads: int | None
    vllm_version: str
    kv_format: KvFormat | None = None
    """Layout of exported prompt KV. None if prompts cannot be exported; `kv_reason` says why."""
    kv_reason: KvReason | None = None
    kv_gpu_memory: tuple[GpuMemory, ...] = ()
    """GPU memory in which exported KV can stay, of every rank that exports, if there is any."""
    kept_kv_reason: KeptKvReason | None = None
    """Reason why requests cannot have `kept_kv`; None if they can."""
    can_sleep: bool = False
    max_adapters: int = 0
    """Maximum number of loaded adapters. 0 disables adapters."""
    max_adapter_rank: int = 0
    returns_routed_experts: bool = False
    max_logprobs: int = 0
    """Maximum number of top logprobs per token in a request."""
    template_variables: frozenset[str] = frozenset()
    """Names in `ChatRequest.template_options` that the chat template uses."""
    features: tuple[FeatureStatus, ...] = ()
    """Optional features of the engine, as decided at its start."""
    max_token_chars: int | None = None
    """Maximum characters of text per token.

    A text longer than this times the context length cannot fit. None if unknown.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPhase:
    """Current phase of a start, such as compiling, and how far it is, if that is known."""

    name: str
    seconds: float
    num_done: int | None = None
    num_total: int | None = None

    def __str__(self) -> str:
        progress = "" if self.num_total is None else f" ({self.num_done} of {self.num_total})"
        return f"{self.name}, {self.seconds:.0f} s{progress}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """Liveness of the engine: its stage and the seconds since the last heartbeat."""

    stage: EngineStage
    alive: bool
    age_seconds: float
    reason: str | None = None
    start_phase: StartPhase | None = None

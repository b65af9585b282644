"""What an engine is started with: typed fields, never a bag of extras. No torch, no vLLM here."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

GIB = 2**30
DType = Literal["auto", "float32", "bfloat16", "float16"]
SharedPrefixMode = Literal["auto", "always", "off"]


def cache_directory(name: str) -> Path:
    """Where things are kept between two runs when no directory is named."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "coppice" / name


class AttentionSettings(BaseModel):
    """How attention reads what many samples share."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shared_prefix: Annotated[
        SharedPrefixMode,
        BeforeValidator(lambda value: "off" if value is False else value),  # as YAML reads it
        Field(
            description="read a shared prefix once a step; auto: where that was measured to be "
            "faster; always: wherever anything is shared"
        ),
    ] = "auto"
    cache_directory: Path = Field(
        default_factory=lambda: cache_directory("attention"),
        description="directory that keeps the measurement that auto decides by",
    )


class EngineSettings(BaseModel):
    """Settings of the engine; the description of each field says its unit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Annotated[
        str, Field(min_length=1, description="local directory, or id on a model hub")
    ] = str(Path(__file__).parents[1] / "examples" / "seedling" / "model")
    revision: Annotated[
        str | None, Field(description="commit of the hub's repository; needed with an id")
    ] = None
    dtype: Annotated[DType, Field(description="type of weights and cache; auto: as stored")] = (
        "auto"
    )
    tensor_parallel_size: Annotated[int, Field(ge=1, description="ranks a layer is split over")] = 1
    pipeline_parallel_size: Annotated[int, Field(ge=1, description="ranks layers are dealt to")] = 1
    block_size: Annotated[
        int, Field(ge=16, multiple_of=16, description="tokens a cache block holds")
    ] = 32
    cache_bytes: Annotated[
        int | None,
        Field(
            ge=2**20, description="bytes of KV cache a rank; none: 1 GiB on CPU, measured on a GPU"
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float, Field(gt=0, le=1, description="share of a GPU's memory that the engine may use")
    ] = 0.9
    max_context_tokens: Annotated[
        int | None,
        Field(ge=2, description="prompt and response tokens served; none: the model's own"),
    ] = None
    max_sequences: Annotated[int, Field(ge=1, description="samples that decode side by side")] = 256
    max_batched_tokens: Annotated[
        int, Field(ge=32, description="tokens computed in one step at most")
    ] = 2048
    cpu_threads: Annotated[
        int | None,
        Field(ge=1, description="threads a rank computes with on CPU; none: shared out evenly"),
    ] = None
    eager: Annotated[
        bool | None,
        Field(description="no compilation, no CUDA graphs; none: true on CPU, false on a GPU"),
    ] = None
    prompt_kv: Annotated[
        bool, Field(description="prompt keys and values can be exported as soon as computed")
    ] = False
    tool_parser: Annotated[
        str | None,
        Field(description="vLLM's parser that finds tool calls in responses, such as hermes"),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        Field(description="vLLM's parser that finds reasoning in responses, such as qwen3"),
    ] = None
    weight_transfer: Annotated[
        Literal["nccl", "ipc"] | None,
        Field(description="vLLM's own weight-transfer engine, beside HTTP"),
    ] = None
    start_seconds: Annotated[
        float, Field(gt=0, description="seconds a start may take before it counts as dead")
    ] = 1800.0
    step_seconds: Annotated[
        float,
        Field(gt=0, description="seconds without a sign of life before the engine counts as dead"),
    ] = 10.0
    hang_seconds: Annotated[
        float,
        Field(gt=0, description="seconds that a dead engine may hang before it is killed"),
    ] = 60.0
    activation_seconds: Annotated[
        float, Field(gt=0, description="the same while weights are loaded")
    ] = 600.0

    @model_validator(mode="before")
    @classmethod
    def _refuse_data_parallel(cls, values: Any) -> Any:
        if isinstance(values, dict) and "data_parallel_size" in values:
            raise ValueError(
                "data parallel inside one service is refused: run more replicas instead"
            )
        return values

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def threads_per_rank(self) -> int:
        available = len(os.sched_getaffinity(0))
        return self.cpu_threads or max(1, available // self.num_ranks)

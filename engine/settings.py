"""Typed engine settings. Imports neither torch nor vLLM."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from engine.cudagraphs.draft_length_tiers import DraftLengthTiers

GIB = 2**30
MAX_DRAFT_TOKENS = 15
"""With the last sampled token, 16 query tokens: the limit of shared-prefix attention."""
DType = Literal["auto", "float32", "bfloat16", "float16"]
SharedPrefixMode = Literal["auto", "always", "off"]
SpeculationMode = Literal["auto", "off", "siblings", "drafter"]
AdapterRank = Literal[8, 16, 32, 64, 128, 256]


def _parse_off(value: object) -> object:
    """Undo YAML's conversion of the word `off` to false."""
    return "off" if value is False else value


def _parse_number(value: object) -> object:
    """Convert digits to int, because flags and environment variables are text."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def cache_directory(name: str) -> Path:
    """Default directory of data that is kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "coppice" / name


class AttentionSettings(BaseModel):
    """Settings of shared-prefix attention."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shared_prefix: Annotated[
        SharedPrefixMode,
        BeforeValidator(_parse_off),
        Field(
            description="read a shared prefix once a step; auto: where that was measured to be "
            "faster; always: wherever anything is shared"
        ),
    ] = "auto"
    cache_directory: Path = Field(
        default_factory=lambda: cache_directory("attention"),
        description="directory that keeps the measurement that auto decides by",
    )


class SpeculationSettings(BaseModel):
    """Settings of speculative decoding from sibling samples or by a trained draft model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Annotated[
        SpeculationMode,
        BeforeValidator(_parse_off),
        Field(
            description="siblings: draft from the group's own text; drafter: by a small model; "
            "auto: siblings on CPU, unless a short profile at the start says that it cannot pay, "
            "and off on a GPU"
        ),
    ] = "off"
    longest_draft: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_DRAFT_TOKENS,
            description="tokens drafted for one sample in one step at most",
        ),
    ] = 8
    store_bytes: Annotated[
        int, Field(ge=2**20, description="bytes of text that drafts are taken from at most")
    ] = 2**28
    store_file: Annotated[
        Path | None,
        Field(description="file that keeps that text from one run to the next; none: it is not"),
    ] = None
    cache_directory: Path = Field(
        default_factory=lambda: cache_directory("speculation"),
        description="directory that keeps the profile of what steps cost",
    )
    drafter: Annotated[
        Path | None,
        Field(
            description="model directory of the drafter, with the model's own vocabulary; none: a "
            "small one is made and learns from nothing"
        ),
    ] = None
    drafter_directory: Path = Field(
        default_factory=lambda: cache_directory("drafter"),
        description="directory that keeps what became of drafters",
    )
    drafter_training: Annotated[
        bool, Field(description="the drafter learns from what is served, in a process of its own")
    ] = True
    drafter_trained: Annotated[
        Literal["all", "layers"],
        Field(description="layers: its embedding, its head and its last norm stay as they are"),
    ] = "all"
    drafter_busy_share: Annotated[
        float,
        Field(ge=0, le=1, description="share of engine.max_sequences running above which it waits"),
    ] = 0.5


def _validate_lengths(text: str | None) -> str | None:
    if text is not None:
        DraftLengthTiers.parse(text)
    return text


class GraphsSettings(BaseModel):
    """Settings of CUDA graph capture on a GPU."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    budget_bytes: Annotated[
        int | None,
        Field(
            ge=2**20, description="bytes of CUDA graphs a rank; none: vLLM captures what it does"
        ),
    ] = None
    lengths: Annotated[
        str | None,
        BeforeValidator(lambda value: str(value) if isinstance(value, int) else value),
        AfterValidator(_validate_lengths),
        Field(
            description="draft tokens that may be chosen, by samples running: 8:0,2,4 32:0,2 0 is "
            "0, 2 or 4 up to 8 samples, 0 or 2 up to 32, none beyond; none: as speculation drafts"
        ),
    ] = None
    mixed_tokens: Annotated[
        int,
        Field(ge=0, description="tokens of the largest graph for steps that compute prompts too"),
    ] = 512
    graph_bytes: Annotated[
        int | None,
        Field(ge=1, description="bytes a captured graph takes; none: estimated from the layers"),
    ] = None
    trace: Annotated[
        Path | None,
        Field(description="recorded steps to plan for; none: any number of samples is as likely"),
    ] = None


class EngineSettings(BaseModel):
    """Engine settings; the description of each field states its unit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Annotated[
        str, Field(min_length=1, description="local directory, or id on a model hub")
    ] = str(Path(__file__).parents[1] / "examples" / "seedling" / "model")
    revision: Annotated[
        str | None, Field(description="commit of the hub's repository; needed with an id")
    ] = None
    served_model_name: Annotated[
        str | None,
        Field(
            pattern=r"^[A-Za-z0-9][\w.:@-]*(/[\w.:@-]+)*$",
            max_length=256,
            description="name that the model has in requests and answers; none: its id on the hub, "
            "or the last component of its directory",
        ),
    ] = None
    dtype: Annotated[
        DType,
        Field(
            description="type of weights and cache; auto: bfloat16, or float16 where the model is "
            "stored so; float32 on a CPU without bfloat16 instructions"
        ),
    ] = "auto"
    seed: Annotated[
        int | None,
        Field(
            ge=0,
            le=2**32 - 1,
            description="vLLM's random seed, for samples without a seed of their own; none: a "
            "random one at each start, which is logged",
        ),
    ] = None
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
    max_logprobs: Annotated[
        int,
        Field(
            ge=0,
            le=1024,
            description="likeliest tokens that a request may ask for at each token, by the routes "
            "of OpenAI's and vLLM's clients",
        ),
    ] = 20
    max_adapters: Annotated[
        int,
        Field(
            ge=0,
            le=256,
            description="LoRA adapters held at once, those too that are replaced while samples "
            "still run under them; 0: none are served",
        ),
    ] = 0
    max_adapter_rank: Annotated[
        AdapterRank,
        BeforeValidator(_parse_number),
        Field(description="rank of such an adapter at most"),
    ] = 16
    weight_transfer: Annotated[
        Literal["nccl", "ipc"] | None,
        Field(description="vLLM's own weight-transfer engine; no route here uses it"),
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
    def served_name(self) -> str:
        """The name in requests and responses.

        A directory name that is not valid UTF-8 is converted.
        """
        directory = Path(self.model).expanduser()
        if self.served_model_name is not None or not directory.is_dir():
            return self.served_model_name or self.model
        name = os.path.basename(os.path.abspath(directory))
        return os.fsencode(name).decode(errors="replace") or "model"

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def threads_per_rank(self) -> int:
        available = len(os.sched_getaffinity(0))
        return self.cpu_threads or max(1, available // self.num_ranks)

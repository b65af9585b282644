"""Typed engine settings. Imports neither torch nor vLLM."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from engine.settings.base import BufferBytes, PositiveInt, Ratio, Seconds
from engine.settings.vllm_arguments import VllmSettings, with_same_names

GIB = 2**30
SESSION_KV_SECONDS = 300.0
"""Time after a session's call in which its KV is retained: most tools of agents end within it."""
MIN_ACTIVATION_SECONDS = 600.0
"""Least heartbeat timeout while weights are loaded. A start, which also compiles and captures
graphs, takes at least three times as long as a load."""
HANG_TIMEOUTS = 6
"""Further timeouts for which a late engine may recover before it is killed."""


def _parse_number(value: object) -> object:
    """Convert digits to int, because flags and environment variables are text."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


DType = Literal["auto", "float32", "bfloat16", "float16"]
AdapterRank = Literal[8, 16, 32, 64, 128, 256]


def default_cache_directory() -> Path:
    """Directory in the user's cache for data that is kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "coppice"


class EngineSettings(VllmSettings):
    """Model, parallelism, KV cache, limits and timeouts of the vLLM engine."""

    model: str = Field(
        str(Path(__file__).parents[2] / "examples" / "seedling" / "model"),
        min_length=1,
        description="local model directory, or model id on the Hugging Face hub; set it to the "
        "model that is trained",
    )
    revision: str | None = Field(
        None,
        description="commit hash of the hub repository; required with a hub id",
    )
    served_model_name: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][\w.:@-]*(/[\w.:@-]+)*$",
        max_length=256,
        description="model name in requests and responses; none: the hub id, or the last "
        "component of the directory; set it if clients use another name",
    )
    dtype: DType = Field(
        "auto",
        description="data type of weights and KV cache; auto: bfloat16, or float16 if the model "
        "is stored in it, or float32 on a CPU without bfloat16 instructions; set it to float32 to "
        "compare log-probabilities exactly",
    )
    seed: int | None = Field(
        None,
        ge=0,
        le=2**32 - 1,
        description="random seed of vLLM, for samples without their own seed; none: a random seed "
        "at each start, which is logged; leave it unset if several replicas serve one trainer",
    )
    tensor_parallel_size: PositiveInt = Field(
        1,
        description="number of ranks that each layer is split over; increase it if the model does "
        "not fit on one GPU",
    )
    pipeline_parallel_size: PositiveInt = Field(
        1,
        description="number of ranks that the layers are distributed over; increase it if the "
        "model does not fit and its heads cannot be split further",
    )
    data_parallel_size: PositiveInt = Field(
        1,
        description="number of engines in this service, each with all weights and a KV cache of "
        "its own; the samples of a group, session or chain run on one of them; increase it to use "
        "more GPUs of one machine by one service, for a model that fits on fewer",
    )
    block_size: int | None = Field(
        None,
        ge=16,
        multiple_of=16,
        description="number of tokens per KV cache block; none: 32 on CPU, on a GPU the choice of "
        "vLLM for the attention backend; reduce it to share shorter prefixes",
    )
    cache_bytes: BufferBytes | None = Field(
        None,
        description="size of the KV cache per rank, in bytes; none: 1 GiB on CPU, on a GPU what "
        "the weights leave of engine.gpu_memory_utilization; increase it on CPU if vLLM preempts "
        "samples",
    )
    gpu_memory_utilization: float = Field(
        0.9,
        gt=0,
        le=1,
        description="share of GPU memory for the engine; reduce it if a trainer uses the same GPU",
    )
    max_context_tokens: int | None = Field(
        None,
        ge=2,
        description="maximum number of prompt and response tokens per sample; none: the model's "
        "limit; reduce it if the KV cache does not fit",
    )
    max_sequences: PositiveInt | None = Field(
        None,
        description="maximum number of samples that decode at the same time; none: 256 on CPU, on "
        "a GPU the limit of vLLM, such as 1024 on an H100; reduce it if vLLM preempts samples",
    )
    max_batched_tokens: int | None = Field(
        None,
        ge=32,
        description="maximum number of tokens computed in one engine step; none: 2048 on CPU, on "
        "a GPU the limit of vLLM, such as 8192 on an H100; increase it to prefill faster",
    )
    cache_directory: Path = Field(
        default_factory=default_cache_directory,
        description="directory for what later starts use again: measured speeds of attention, "
        "measured times of engine steps, and checkpoints of trained draft models; change it to a "
        "volume that outlives the container",
    )
    cpu_threads: PositiveInt | None = Field(
        None,
        description="number of compute threads per rank on CPU; none: the available cores divided "
        "by the number of ranks; reduce it if other processes need the cores",
    )
    eager: bool | None = Field(
        None,
        description="disables compilation and CUDA graphs; none: true on CPU, false on a GPU; set "
        "it to true for a faster start while debugging",
    )
    prompt_kv: bool | None = Field(
        None,
        description="enables the export of prompt KV; none: true if kv.directory has room for it; "
        "set it to false if no trainer fetches prompt KV",
    )
    prompt_kv_gpu_bytes: BufferBytes | None = Field(
        None,
        description="GPU memory of each rank in which exported prompt KV stays until its leases "
        "end, in bytes, taken from what engine.gpu_memory_utilization leaves; none: exported KV is "
        "in shared memory only; set it if trainers on the same host read KV by CUDA IPC",
    )
    tool_parser: str | None = Field(
        None,
        description="name of the vLLM parser for tool calls in responses, such as hermes; none: "
        "tool calls stay in the text; set it for chat clients that use tools",
    )
    reasoning_parser: str | None = Field(
        None,
        description="name of the vLLM parser for reasoning in responses, such as qwen3; none: "
        "reasoning stays in the text; set it for chat clients of a reasoning model",
    )
    max_logprobs: int = Field(
        20,
        ge=0,
        le=1024,
        description="maximum number of top logprobs per token in a request; increase "
        "it for clients that need more, such as a distillation",
    )
    return_routed_experts: bool = Field(
        False,
        description="requests can return the experts that each token was routed to; set "
        "it to train a mixture-of-experts model with the sampled routing; takes host memory of one "
        "byte per KV slot, layer and expert of a token (two above 256 experts), and copies the "
        "experts of every step from the device",
    )
    max_adapters: int = Field(
        0,
        ge=0,
        le=256,
        description="maximum number of loaded versions of LoRA adapters; 0: adapters are "
        "disabled; set it to the number of adapters, plus one for each that is updated while "
        "rollouts use its previous version",
    )
    max_adapter_rank: Annotated[AdapterRank, BeforeValidator(_parse_number)] = Field(
        16,
        description="maximum rank of a LoRA adapter; a larger one takes more memory; increase it "
        "to the highest rank of the adapters",
    )
    session_kv_fraction: Ratio = Field(
        0.5,
        description="maximum share of the KV cache in which KV of paused agent sessions is evicted "
        "after all other cached KV, for 300 seconds after a call; no request waits for it; 0: it "
        "is evicted like all other; reduce it if other callers' prompts share long prefixes",
    )
    enable_sleep_mode: bool | None = Field(
        None,
        description="lets callers release the engine's memory while it sleeps, through vLLM's "
        "allocator of sleep mode; none: true on CPU, false on a GPU; set it to true if a trainer "
        "uses the same GPU",
    )
    weight_transfer: Literal["ipc"] | None = Field(
        None,
        description="backend of vLLM's weight transfer; ipc: a trainer on the same host, whose API "
        "key has the role admin, hands weights over in GPU memory by CUDA IPC; none: weights are "
        "published as files only; set it to ipc if the trainer uses the engine's GPUs",
    )
    start_seconds: Seconds = Field(
        1800.0,
        description="timeout of the engine's start, in seconds; an activation of weights may take "
        "a third of it, and at least 600; increase it for large models on slow disks",
    )
    step_seconds: Seconds = Field(
        10.0,
        description="heartbeat timeout, in seconds: the engine is unhealthy without a heartbeat "
        "for this long, and is killed if it remains so for six times as long; increase it if "
        "single engine steps take longer",
    )

    @model_validator(mode="before")
    @classmethod
    def _apply_same_names(cls, values: Any) -> Any:
        return with_same_names(values) if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _check_ray(self) -> Self:
        if self.uses_ray and self.nnodes > 1:
            raise ValueError(
                "distributed_executor_backend ray and nnodes above 1 exclude each other: Ray "
                "places the ranks, and only one machine runs a service"
            )
        return self

    @model_validator(mode="after")
    def _check_nodes(self) -> Self:
        if self.node_rank >= self.nnodes:
            raise ValueError(f"node_rank is {self.node_rank}, and nnodes is {self.nnodes}")
        if self.num_ranks % self.nnodes:
            raise ValueError(
                f"nnodes is {self.nnodes}, which does not divide the {self.num_ranks} ranks of "
                "tensor_parallel_size times pipeline_parallel_size"
            )
        return self

    @property
    def served_name(self) -> str:
        """Model name in requests and responses, converted to valid UTF-8."""
        directory = Path(self.model).expanduser()
        if self.served_model_name is not None or not directory.is_dir():
            return self.served_model_name or self.model
        name = os.path.basename(os.path.abspath(directory))
        return os.fsencode(name).decode(errors="replace") or "model"

    @property
    def num_ranks(self) -> int:
        """Number of ranks of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_per_node(self) -> int:
        return self.num_ranks // self.nnodes

    @property
    def activation_seconds(self) -> float:
        """Heartbeat timeout while weights are loaded."""
        return max(MIN_ACTIVATION_SECONDS, self.start_seconds / 3)

    @property
    def hang_seconds(self) -> float:
        """Time after which an engine that remains unhealthy is killed."""
        return HANG_TIMEOUTS * self.step_seconds

    @property
    def uses_ray(self) -> bool:
        return self.distributed_executor_backend == "ray"

    @property
    def uses_several_machines(self) -> bool:
        """True if ranks are, or may be, on other machines than the service."""
        return self.nnodes > 1 or self.uses_ray

    @property
    def has_workers(self) -> bool:
        """True if the ranks are processes of their own, not threads of EngineCore."""
        return self.num_ranks > 1 or self.distributed_executor_backend is not None

    @property
    def threads_per_rank(self) -> int:
        available = len(os.sched_getaffinity(0))
        ranks = self.ranks_per_node * self.data_parallel_size
        return self.cpu_threads or max(1, available // ranks)

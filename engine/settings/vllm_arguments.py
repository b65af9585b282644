"""Settings passed to vLLM as engine arguments: named fields, and the map `vllm_args`.

Imports neither torch nor vLLM. `engine.launch.vllm_argument_checks` checks the values against
vLLM's types.
"""

from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field

from engine.settings.base import BufferBytes, Count, PositiveInt, Section

LoadFormat = Literal[
    "safetensors", "auto", "fastsafetensors", "instanttensor", "runai_streamer", "dummy"
]
"""Load formats of vLLM that read `*.safetensors` files, as a later version does, or none."""


def parse_map(value: object) -> object:
    """Convert the text of a flag or variable, a YAML or JSON mapping, to a dictionary."""
    if value is None:
        return {}
    if not isinstance(value, str):
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        raise ValueError("must be a mapping in YAML or JSON, such as {name: value}") from None


ArgumentMap = Annotated[dict[str, Any], BeforeValidator(parse_map)]


class VllmSettings(Section):
    """Engine settings that are passed to vLLM unchanged under the same name.

    All but `chat_template`, `kv_offload_bytes` and `vllm_args` are fields of vLLM's engine
    arguments.
    """

    quantization: str | None = Field(
        None,
        description="vLLM's quantization method, such as fp8_per_channel; none: the method of the "
        "model's config.json; set it to quantize 16-bit weights whenever they are loaded, at the "
        "start and with each weights version",
    )
    kv_cache_dtype: str = Field(
        "auto",
        description="data type of the KV cache; auto: the data type of the model; fp8: twice as "
        "many tokens, without prompt KV and, on CPU, shared-prefix attention; set it to fp8 if the "
        "KV cache is too small",
    )
    load_format: LoadFormat = Field(
        "safetensors",
        description="vLLM's reader of the model's *.safetensors files; fastsafetensors and "
        "runai_streamer need the packages fastsafetensors and runai-model-streamer; dummy: random "
        "weights, for benchmarks, without weights versions, adapters or a draft model; set it to "
        "one of the first two to load large models faster",
    )
    trust_remote_code: bool = Field(
        False,
        description="runs Python code of the model's directory; set it only for models whose code "
        "you have read",
    )
    tokenizer: str | None = Field(
        None,
        description="local directory or hub id of the tokenizer; none: the model's; set it for "
        "models whose directory has none",
    )
    enable_expert_parallel: bool = Field(
        False,
        description="distributes whole experts of a mixture-of-experts model over the ranks "
        "instead of splitting each one; enable it on GPUs for models of many small experts; "
        "refused on a CPU with several ranks",
    )
    distributed_executor_backend: Literal["mp", "ray"] | None = Field(
        None,
        description="vLLM's executor of the ranks; mp: a process per rank, on engine.nnodes "
        "machines; ray: an actor per rank, placed by the Ray cluster that this machine is a node "
        "of; none: mp if there are several ranks; set it to ray if a Ray cluster has the GPUs, or "
        "to mp to run a single rank in a process of its own",
    )
    nnodes: PositiveInt = Field(
        1,
        description="number of machines that the ranks are distributed over; each runs `coppice "
        "serve` with the same settings and its own engine.node_rank; increase it if the model does "
        "not fit on one machine",
    )
    node_rank: Count = Field(
        0,
        description="index of this machine; machine 0 serves requests, the others only run their "
        "ranks; set it on each machine if engine.nnodes is above 1",
    )
    master_addr: str = Field(
        "127.0.0.1",
        min_length=1,
        description="name or IP address of machine 0, which the other machines connect to; set it "
        "if engine.nnodes is above 1",
    )
    master_port: int = Field(
        29501,
        ge=1,
        le=65535,
        description="TCP port of machine 0 for torch.distributed; change it if another process "
        "uses the port",
    )
    async_scheduling: bool | None = Field(
        None,
        description="schedules an engine step while the previous one runs; none: true where vLLM "
        "supports it; set it to false to measure the effect",
    )
    chat_template: str | None = Field(
        None,
        description="file with a Jinja chat template, or the template itself; none: the "
        "tokenizer's; set it for base models, which have none",
    )
    kv_offload_bytes: BufferBytes | None = Field(
        None,
        description="host memory for KV blocks that are evicted from the cache, in bytes over all "
        "ranks; none: evicted blocks are prefilled again; set it for agents that continue long "
        "conversations after a pause",
    )
    vllm_args: ArgumentMap = Field(
        default_factory=dict,
        description="mapping with any other field of vLLM's AsyncEngineArgs, by vLLM's name, such "
        "as {stream_interval: 4}; set it for fields that have no setting here",
    )

    @property
    def has_random_weights(self) -> bool:
        return self.load_format == "dummy"


PASSED_UNCHANGED = tuple(
    name
    for name in VllmSettings.model_fields
    if name not in ("chat_template", "kv_offload_bytes", "vllm_args")
)
"""Settings that are vLLM's engine arguments of the same name."""
SAME_NAMES = {
    *PASSED_UNCHANGED,
    *("model", "revision", "served_model_name", "dtype", "seed", "block_size", "max_logprobs"),
    *("tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization"),
    "reasoning_parser",
}
"""Settings that have the name and the meaning of an engine argument of vLLM."""


def with_same_names(values: dict[str, Any]) -> dict[str, Any]:
    """Settings in which a vLLM argument that has the name of a setting is that setting."""
    try:
        arguments = parse_map(values.get("vllm_args"))
    except ValueError:
        return values  # the field's own validation reports it
    if not isinstance(arguments, dict):
        return values
    same = arguments.keys() & SAME_NAMES
    if twice := sorted(same & values.keys()):
        raise ValueError(f"{twice[0]} and vllm_args.{twice[0]} are both set; set one of them")
    others = {name: value for name, value in arguments.items() if name not in same}
    return {**values, **{name: arguments[name] for name in same}, "vllm_args": others}

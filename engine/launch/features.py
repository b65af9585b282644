"""Optional features of a started engine: on or off, why, and the setting that changes it."""

from dataclasses import replace
from typing import Any, Final

from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES

from engine.cudagraphs.planner import Plan
from engine.feature_stats import AttentionState, FeatureStatus
from engine.settings import (
    SESSION_KV_SECONDS,
    AttentionSettings,
    EngineSettings,
    SpeculationMode,
    SpeculationSettings,
)
from engine.speculation.baseline import GainPrediction
from engine.speculation.cost import MIN_SPEEDUP
from engine.types import EngineInfo

GPU_DEVICE: Final = "cuda"
UNSUPPORTED: Final[dict[AttentionState, tuple[str, str]]] = {
    "off": ("attention.shared_prefix is off", "attention.shared_prefix: auto"),
    "backend": (
        "backend: the model uses a vLLM attention backend that it does not replace",
        "engine.vllm_args.attention_backend",
    ),
    "not_built": ("the kernel is not compiled", "install with a C++ compiler"),
    "isa": (
        "the processor has no AVX2, or vLLM packs the KV cache for other instructions (AMX in "
        "bfloat16, ARM)",
        "engine.dtype: float32 on a processor with AMX",
    ),
    "dtype": ("the kernel does not support the data type", "engine.dtype"),
    "kv_cache_dtype": ("the KV cache is quantized", "engine.kv_cache_dtype: auto"),
    "head_size": ("the kernel does not support the head size", ""),
    "block_size": ("the kernel does not support the block size", "engine.block_size"),
    "not_causal": ("attention is not causal", ""),
    "sliding_window": ("all layers have sliding windows", ""),
    "soft_cap": ("the model caps attention logits", ""),
    "alibi": ("the model has ALiBi position biases", ""),
    "sinks": ("the model has attention sinks", ""),
    "model_runner": ("vLLM uses Model Runner V1, which does not support it", ""),
    "parallelism": (
        "it does not support decode context parallelism, micro-batches, or pipeline stages that "
        "differ",
        "",
    ),
    "batch_invariant": ("VLLM_BATCH_INVARIANT is set", "unset VLLM_BATCH_INVARIANT"),
    "failed": ("an error at the start, which is logged, has switched it off", ""),
}
DRAFTS: Final = {
    "auto": "drafts come from sibling samples where a profile shows a gain",
    "siblings": "drafts come from sibling samples",
    "drafter": "drafts come from a draft model",
}


def engine_features(
    config: Any,
    settings: EngineSettings,
    *,
    device: str,
    attention: tuple[AttentionSettings, AttentionState],
    speculation: tuple[SpeculationSettings, str | None],
    graphs: Plan | None,
    indirect_kv: str | None,
    gpu_kv: str,
) -> tuple[FeatureStatus, ...]:
    """Features of an engine with vLLM's `config`.

    `speculation`: the settings, and the reason why nothing is drafted. `indirect_kv`: the reason
    why a GPU does not copy prompt KV directly into shared memory. `gpu_kv`: the reason why no
    prompt KV stays on the GPUs, or empty.
    """
    return (
        _shared_prefix(*attention),
        _speculation(*speculation),
        _graph_plan(settings, graphs, device),
        _random_weights(settings),
        _adapters(settings),
        _direct_kv_copies(indirect_kv),
        _gpu_kv(settings, gpu_kv),
        _kv_offloading(settings),
        _session_kv_retention(settings),
        _quantization(config, settings),
        _quantized_kv(settings),
        _expert_parallel(config, settings),
        _routed_experts(settings),
        _async_scheduling(config, settings),
        _parser("tool_parser", settings.tool_parser, "tool calls", "stay"),
        _parser("reasoning_parser", settings.reasoning_parser, "reasoning", "stays"),
    )


def _feature(name: str, enabled: object, reason: str, how: str = "") -> FeatureStatus:
    return FeatureStatus(name=name, enabled=bool(enabled), reason=reason, how_to_change=how)


def _shared_prefix(settings: AttentionSettings, state: AttentionState) -> FeatureStatus:
    name = "shared_prefix_attention"
    if state in UNSUPPORTED:
        return _feature(name, False, *UNSUPPORTED[state])
    steps = "steps where a measurement shows a gain"
    reason = "every step with a shared prefix" if settings.shared_prefix == "always" else steps
    return _feature(name, True, f"used in {reason}", "attention.shared_prefix: off")


def _speculation(settings: SpeculationSettings, why_off: str | None) -> FeatureStatus:
    if why_off is not None:
        how = "speculation.mode: siblings" if settings.mode == "off" else ""
        return _feature("speculation", False, why_off, how)
    return _feature("speculation", True, DRAFTS[settings.mode], "speculation.mode: off")


def with_prediction(
    info: EngineInfo, mode: SpeculationMode, prediction: GainPrediction | None
) -> EngineInfo:
    """Properties of an engine with features according to what its drafts are predicted to gain.

    Without a prediction `auto` drafts nothing.
    """
    if mode == "off" or (prediction is not None and prediction.is_sufficient):
        return info
    features = (
        _without_gain(feature, mode, prediction) if feature.name == "speculation" else feature
        for feature in info.features
    )
    return replace(info, features=tuple(features))


def _without_gain(
    feature: FeatureStatus, mode: SpeculationMode, prediction: GainPrediction | None
) -> FeatureStatus:
    if mode != "auto":
        return replace(feature, reason=f"{feature.reason}; {prediction}") if prediction else feature
    if prediction is None:
        return _feature("speculation", False, "auto: no step times could be measured")
    how = "speculation.mode: siblings"
    if prediction.is_loss:
        how += ", speculation.allow_predicted_loss: true"
    reason = f"auto: {prediction}, and {MIN_SPEEDUP} times is required"
    return _feature("speculation", False, reason, how)


def _graph_plan(settings: EngineSettings, plan: Plan | None, device: str) -> FeatureStatus:
    name, how = "cuda_graph_plan", "graphs.budget_bytes"
    if plan is not None:
        return _feature(name, True, "the graphs captured fit graphs.budget_bytes", how)
    if device != GPU_DEVICE:
        return _feature(name, False, "there are no CUDA graphs on CPU")
    if settings.eager:
        return _feature(name, False, "engine.eager is true", "engine.eager: false")
    return _feature(name, False, "graphs.budget_bytes is none: vLLM captures its own sizes", how)


def _random_weights(settings: EngineSettings) -> FeatureStatus:
    is_on = settings.has_random_weights
    reason = "no weights are loaded: benchmarks only" if is_on else "the model's files are loaded"
    return _feature("random_weights", is_on, reason, "engine.load_format")


def _adapters(settings: EngineSettings) -> FeatureStatus:
    num, rank = settings.max_adapters, settings.max_adapter_rank
    reason = f"up to {num} adapters of rank {rank}" if num else "engine.max_adapters is 0"
    return _feature("lora_adapters", num, reason, "engine.max_adapters")


def _direct_kv_copies(indirect_reason: str | None) -> FeatureStatus:
    reason = indirect_reason or "the GPU copies prompt KV into registered shared memory"
    return _feature("direct_kv_copies", indirect_reason is None, reason)


def _gpu_kv(settings: EngineSettings, why_off: str) -> FeatureStatus:
    how = "engine.prompt_kv_gpu_bytes"
    reason = why_off or "exported KV also stays in GPU memory, for readers by CUDA IPC"
    return _feature("prompt_kv_on_gpu", not why_off, reason, how)


def _kv_offloading(settings: EngineSettings) -> FeatureStatus:
    num_bytes = settings.kv_offload_bytes
    reason = "engine.kv_offload_bytes is " + ("none" if num_bytes is None else f"{num_bytes}")
    return _feature("kv_offloading", num_bytes is not None, reason, "engine.kv_offload_bytes")


def _session_kv_retention(settings: EngineSettings) -> FeatureStatus:
    fraction, how = settings.session_kv_fraction, "engine.session_kv_fraction"
    reason = f"up to {fraction:.0%} of the KV cache, for {SESSION_KV_SECONDS:g} s"
    reason = reason if fraction else f"{how} is 0"
    return _feature("session_kv_retention", fraction, reason, how)


def _quantization(config: Any, settings: EngineSettings) -> FeatureStatus:
    method = config.model_config.quantization
    how = "engine.quantization"
    if _quantizes_experts_only(config.model_config) and not config.model_config.is_moe:
        return _feature("quantization", False, f"{method}: the model has no experts", how)
    origin = "the model's config.json: its weights cannot be updated"
    if settings.quantization:
        origin = how
    reason = f"{method}, from {origin}" if method else "weights are not quantized"
    return _feature("quantization", method, reason, how)


def _quantizes_experts_only(model_config: Any) -> bool:
    """True for a method of vLLM that quantizes on loading, but no linear layers."""
    if model_config.quantization not in ONLINE_QUANT_SHORTHAND_NAMES:
        return bool(model_config.quantization == "experts_int8")
    layers = model_config.quantization_config
    return layers is not None and layers.linear is None and layers.targets is None


def _quantized_kv(settings: EngineSettings) -> FeatureStatus:
    dtype = settings.kv_cache_dtype
    is_on = dtype not in ("auto", "float16", "bfloat16")
    return _feature(
        "quantized_kv_cache", is_on, f"engine.kv_cache_dtype is {dtype}", "engine.kv_cache_dtype"
    )


def _expert_parallel(config: Any, settings: EngineSettings) -> FeatureStatus:
    name, how = "expert_parallel", "engine.enable_expert_parallel"
    if not settings.enable_expert_parallel:
        return _feature(name, False, f"{how} is false", how)
    if not config.model_config.is_moe:
        return _feature(name, False, "the model has no experts")
    if settings.tensor_parallel_size == 1:
        reason = "engine.tensor_parallel_size is 1"
        return _feature(name, False, reason, "engine.tensor_parallel_size")
    return _feature(name, True, f"{how} is true", how)


def _routed_experts(settings: EngineSettings) -> FeatureStatus:
    is_on, how = settings.return_routed_experts, "engine.return_routed_experts"
    return _feature("routed_experts", is_on, f"{how} is {str(is_on).lower()}", how)


def _async_scheduling(config: Any, settings: EngineSettings) -> FeatureStatus:
    is_on, how = config.scheduler_config.async_scheduling, "engine.async_scheduling"
    value = settings.async_scheduling
    reason = f"{how} is {str(value).lower()}" if value is not None else "chosen by vLLM"
    return _feature("async_scheduling", is_on, reason, how)


def _parser(name: str, parser: str | None, parsed: str, verb: str) -> FeatureStatus:
    reason = f"{parser} parses {parsed}" if parser else f"{parsed} {verb} in the text"
    return _feature(name, parser, reason, f"engine.{name}")

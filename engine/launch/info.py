"""Properties of a started AsyncLLM as plain values."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm import __version__ as vllm_version
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from engine.errors import StartFailed
from engine.feature_stats import FeatureStatus
from engine.kv_types import GpuMemory, KvFormat, LayerFormat
from engine.launch.features import GPU_DEVICE, engine_features
from engine.launch.processes import VllmProcesses
from engine.settings import AttentionSettings, EngineSettings, SpeculationSettings
from engine.speculation.startup import why_off
from engine.types import EngineInfo, KeptKvReason, KvReason

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSupport:
    """Format of exported prompt KV, or the reason why there are no exports.

    `indirect_reason` is the reason why a GPU does not copy directly into shared memory,
    `gpu_memory` the memory in which KV can stay on the GPUs, per rank that exports, and
    `gpu_reason` the reason why there is none.
    """

    format: KvFormat | None = None
    reason: KvReason | None = None
    indirect_reason: str | None = None
    gpu_memory: tuple[GpuMemory, ...] = ()
    gpu_reason: str = ""


def collect_info(
    llm: AsyncLLM,
    settings: EngineSettings,
    model_path: Path,
    kv: KvSupport,
    kept_kv_reason: KeptKvReason | None,
    template_variables: frozenset[str],
    features: tuple[FeatureStatus, ...],
) -> EngineInfo:
    """Collect the engine's properties.

    The context length excludes positions reserved for drafts.
    """
    config = llm.vllm_config
    vocab_size = config.model_config.get_vocab_size()
    on_cpu = current_platform.is_cpu()
    return EngineInfo(
        model=settings.served_name,
        model_given=settings.model,
        model_path=model_path,
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        device="cpu" if on_cpu else "cuda",
        block_size=config.cache_config.block_size,
        num_blocks=config.cache_config.num_gpu_blocks,
        kv_bytes_per_token=_kv_bytes_per_token(config),
        max_context_tokens=config.model_config.max_model_len - config.num_speculative_tokens,
        max_sequences=config.scheduler_config.max_num_seqs,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids(llm),
        tensor_parallel_size=settings.tensor_parallel_size,
        pipeline_parallel_size=settings.pipeline_parallel_size,
        data_parallel_size=settings.data_parallel_size,
        cpu_threads=settings.threads_per_rank if on_cpu else None,
        vllm_version=vllm_version,
        kv_format=kv.format,
        kv_reason=kv.reason,
        kv_gpu_memory=kv.gpu_memory,
        kept_kv_reason=kept_kv_reason,
        # torch.topk past the end of the vocabulary would end the engine.
        max_logprobs=min(settings.max_logprobs, vocab_size),
        returns_routed_experts=settings.return_routed_experts,
        max_token_chars=llm.get_tokenizer().max_chars_per_token,
        can_sleep=on_cpu if settings.enable_sleep_mode is None else settings.enable_sleep_mode,
        max_adapters=settings.max_adapters,
        max_adapter_rank=settings.max_adapter_rank if settings.max_adapters else 0,
        template_variables=template_variables,
        features=features,
    )


async def collect_features(
    processes: VllmProcesses,
    settings: EngineSettings,
    attention: AttentionSettings,
    speculation: SpeculationSettings,
    kv: KvSupport,
) -> tuple[FeatureStatus, ...]:
    """Optional features of the engine. All ranks have the same attention layers."""
    states = await processes.call_workers("coppice_attention_state")
    return engine_features(
        processes.llm.vllm_config,
        settings,
        device="cpu" if current_platform.is_cpu() else GPU_DEVICE,
        attention=(attention, states[0]),
        speculation=(speculation, processes.no_drafts_reason or why_off(speculation, settings)),
        graphs=processes.graph_plan,
        indirect_kv=kv.indirect_reason,
        gpu_kv=kv.gpu_reason,
    )


async def kv_support(processes: VllmProcesses, settings: EngineSettings) -> KvSupport:
    """Format of exported prompt KV, or the reason why prompt KV cannot be exported.

    Prepares every rank; one unsupported rank disables exports on all.
    """
    if not settings.prompt_kv:
        off = "prompt KV is off"
        return KvSupport(reason="disabled", indirect_reason=off, gpu_reason=off)
    gpu_bytes = settings.prompt_kv_gpu_bytes or 0
    results = await processes.call_workers("coppice_prepare_kv_export", gpu_bytes)
    reasons, memory, failures = (
        [r.pop(name) for r in results if not isinstance(r, str)]
        for name in ("indirect_reason", "gpu_memory", "gpu_failure")
    )
    if any(isinstance(result, str) or result != results[0] for result in results):
        log.warning("prompt KV cannot be exported: %s", results)
        reason = "the model's KV cache cannot be exported"
        return KvSupport(reason="unsupported_cache", indirect_reason=reason, gpu_reason=reason)
    rope = getattr(processes.llm.vllm_config.model_config.hf_text_config, "rope_parameters", None)
    layers = [LayerFormat(**layer) for layer in results[0].pop("layers")]
    return KvSupport(
        format=KvFormat.of_layers(layers, **results[0], rope=dict(rope or {})),
        indirect_reason=next(filter(None, reasons), None),
        gpu_memory=() if any(failures) else tuple(map(GpuMemory.from_dict, filter(None, memory))),
        gpu_reason=_gpu_reason(settings, failures),
    )


async def kept_kv_reason(processes: VllmProcesses, settings: EngineSettings) -> KeptKvReason | None:
    """Reason why no KV can be kept across weights updates; None if it can."""
    if not processes.llm.vllm_config.cache_config.enable_prefix_caching:
        return "prefix_caching_off"
    if settings.kv_offload_bytes is not None:
        return "kv_offloading"
    can_keep = await processes.call_cores("coppice_can_keep_kv")
    return None if all(can_keep) else "unsupported_cache"


async def check_weight_transfer(processes: VllmProcesses, settings: EngineSettings) -> None:
    """Raise StartFailed if a worker cannot receive weights in GPU memory, as the settings ask."""
    if settings.weight_transfer is None:
        return
    obstacles = await processes.call_workers("coppice_transfer_obstacle")
    if found := [obstacle for obstacle in obstacles if obstacle is not None]:
        raise StartFailed(
            f"engine.weight_transfer is {settings.weight_transfer}: {found[0]}; set it to none"
        )


def _gpu_reason(settings: EngineSettings, failures: Sequence[str | None]) -> str:
    """Reason why no KV stays on the GPUs; empty if it does."""
    if settings.prompt_kv_gpu_bytes is None:
        return "engine.prompt_kv_gpu_bytes is none"
    if current_platform.is_cpu():
        return "there is no GPU"
    return next(filter(None, failures), "")


def _kv_bytes_per_token(config: Any) -> int:
    """Bytes of keys and values per token, over all layers and ranks."""
    model = config.model_config
    dtype = config.cache_config.cache_dtype
    stored = model.dtype if dtype == "auto" else getattr(torch, dtype, torch.uint8)
    heads: int = model.get_total_num_kv_heads()
    layers: int = model.get_total_num_hidden_layers()
    return 2 * layers * heads * int(model.get_head_size()) * torch.empty(0, dtype=stored).itemsize


def eos_token_ids(llm: AsyncLLM) -> tuple[int, ...]:
    """EOS tokens: the tokenizer's, then further ones of the model's generation config."""
    first = llm.renderer.get_eos_token_id()
    more = llm.input_processor.generation_config_fields.get("eos_token_id") or []
    every = [first, *([more] if isinstance(more, int) else more)]
    return tuple(dict.fromkeys(token for token in every if token is not None))

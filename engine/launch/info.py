"""Engine properties (EngineInfo) collected from a started AsyncLLM."""

from pathlib import Path
from typing import Any

import torch
from vllm import __version__ as vllm_version
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from engine.features import Features
from engine.settings import EngineSettings
from engine.types.info import EngineInfo


def collect_info(
    llm: AsyncLLM,
    settings: EngineSettings,
    model_path: Path,
    template_variables: frozenset[str],
    features: Features,
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
        # torch.topk past the end of the vocabulary would end the engine.
        max_logprobs=min(settings.max_logprobs, vocab_size),
        max_token_chars=llm.get_tokenizer().max_chars_per_token,
        can_sleep=on_cpu if settings.enable_sleep_mode is None else settings.enable_sleep_mode,
        template_variables=template_variables,
        features=features.status(),
        **features.info_fields(),
    )


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

"""Limits of a batch and other arguments that all arms of the host path's benchmark share."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

MODEL = "model"
"""Name of the served model."""
CONTEXT_TOKENS = 1024
COMMON: Final[Mapping[str, Any]] = {
    "dtype": "float32",
    "seed": 0,
    "block_size": 32,
    "max_num_seqs": 512,
    "max_num_batched_tokens": 8192,
    "max_model_len": CONTEXT_TOKENS,
    "kv_cache_memory_bytes": 2**27,
}
OUR_NAMES: Final = {
    "max_num_seqs": "max_sequences",
    "max_num_batched_tokens": "max_batched_tokens",
    "max_model_len": "max_context_tokens",
    "kv_cache_memory_bytes": "cache_bytes",
}


def vllm_arguments(model: Path) -> dict[str, Any]:
    """Engine arguments for vLLM, without a tokenizer."""
    return {"model": str(model), **COMMON, "skip_tokenizer_init": True, "enforce_eager": True}


def our_settings(model: Path) -> dict[str, Any]:
    settings = {OUR_NAMES.get(name, name): value for name, value in COMMON.items()}
    return settings | {"model": str(model), "served_model_name": MODEL, "cpu_threads": 1}

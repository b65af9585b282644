"""Tiny random models of several families, written by transformers, with the shipped tokenizer."""

import shutil
from pathlib import Path
from typing import Any, Final

import torch

from tests.engine.seedling import MODEL

VOCAB: Final = 272
HIDDEN: Final = 64
WINDOW: Final = 64
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
MIXED_LAYERS: Final = ["sliding_attention", "full_attention"]
EXPERTS: Final = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
FAMILIES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "dense": ("Qwen3", {}),
    "mixture_of_experts": ("Qwen3Moe", {**EXPERTS, "decoder_sparse_step": 1}),
    "sliding_window": ("Mistral", {"sliding_window": WINDOW}),
    "alternating_windows": (
        "Gemma3",
        {
            "sliding_window": WINDOW,
            "layer_types": MIXED_LAYERS,
            "query_pre_attn_scalar": 32,
            "tie_word_embeddings": True,
        },
    ),
    "heads_of_several_sizes": (
        "Gemma4",
        {
            "sliding_window": WINDOW,
            "layer_types": MIXED_LAYERS,
            "global_head_dim": 64,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": VOCAB,
            "tie_word_embeddings": True,
        },
    ),
    "attention_sinks": (
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": MIXED_LAYERS,
        },
    ),
    "gated_delta_net": (
        "Qwen3Next",
        {
            **EXPERTS,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "shared_expert_intermediate_size": 64,
        },
    ),
}
"""Name of the classes in transformers and further fields of the configuration, by family."""


def save_family(directory: Path, family: str, *, seed: int = 5) -> Path:
    """A model of a family with random weights, so large that logits differ."""
    import transformers

    name, more = FAMILIES[family]
    of_text = getattr(transformers, f"{name}TextConfig", None)
    config = (of_text or getattr(transformers, f"{name}Config"))(**(COMMON | more))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(directory)
    for file in TOKENIZER_FILES:
        if (MODEL / file).exists():
            shutil.copy(MODEL / file, directory)
    return directory

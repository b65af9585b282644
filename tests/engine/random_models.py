"""Random Qwen3 models of half a million parameters, written without a model framework."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 512, 128, 256, 2, 4, 2, 32

Tensors = dict[str, npt.NDArray[Any]]

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "float32",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def random_tensors(seed: int, *, tied: bool, sharpness: float = 1.0) -> Tensors:
    """`sharpness` scales the logits."""
    draw = np.random.default_rng(seed)

    def matrix(*shape: int) -> npt.NDArray[Any]:
        return draw.normal(scale=0.1, size=shape).astype(np.float32)

    def gains(size: int) -> npt.NDArray[Any]:
        return draw.uniform(0.5, 1.5, size=size).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }
        norms = {
            "self_attn.q_norm": HEAD_DIM,
            "self_attn.k_norm": HEAD_DIM,
            "input_layernorm": HIDDEN,
            "post_attention_layernorm": HIDDEN,
        }
        named = {name: matrix(*shape) for name, shape in shapes.items()}
        named |= {name: gains(size) for name, size in norms.items()}
        tensors |= {f"model.layers.{layer}.{n}.weight": t for n, t in named.items()}
    tensors["model.norm.weight"] = gains(HIDDEN) * np.float32(sharpness)
    if not tied:
        tensors["lm_head.weight"] = matrix(VOCAB, HIDDEN)
    return tensors


def write_model(directory: Path, tensors: Tensors, *, tied: bool, num_shards: int = 1) -> Path:
    directory.mkdir(parents=True)
    config = CONFIG | {"tie_word_embeddings": tied}
    (directory / "config.json").write_text(json.dumps(config))
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    else:
        write_shards(directory, tensors, num_shards)
    return directory


def write_shards(directory: Path, tensors: Tensors, num_shards: int) -> None:
    weight_map = {name: f"{i % num_shards}.safetensors" for i, name in enumerate(tensors)}
    for shard in set(weight_map.values()):
        held = {name: values for name, values in tensors.items() if weight_map[name] == shard}
        save_file(held, directory / shard, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def in_bfloat16(directory: Path, copy: Path, file: str = "model.safetensors") -> Path:
    """A copy with values rounded to bfloat16 and stored as such."""
    shutil.copytree(directory, copy)
    rounded = {name: values.bfloat16() for name, values in load_torch(copy / file).items()}
    save_torch(rounded, copy / file, metadata={"format": "pt"})
    return copy


def make_models(directory: Path, *, tied: bool) -> dict[str, Path]:
    """Versions v7 and v8 of one model."""
    return {
        f"v{seed}": write_model(directory / f"v{seed}", random_tensors(seed, tied=tied), tied=tied)
        for seed in (7, 8)
    }

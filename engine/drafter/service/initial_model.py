"""First draft model of a target model: a configured checkpoint, or small random weights.

The cost of a model per token is estimated as its number of weights in matrix products: the layers
and the head.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from coppice.weights.checkpoint_files import SINGLE_FILE
from engine.drafter.service.checkpoint_dir import DrafterDir
from engine.errors import StartFailed
from engine.speculation.settings import MAX_DRAFT_TOKENS
from engine.weights.checkpoint import EMBEDDING, LM_HEAD, Checkpoint

MAX_COST_SHARE: Final = 0.1
"""Maximum cost per token, as a share of the target model's."""
NUM_LAYERS: Final = 2
"""Copying from the context, as in arithmetic and citations, needs two layers."""
HIDDEN_SIZES: Final = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
INIT_SEED: Final = 7
INIT_STD: Final = 0.02
Tensors = dict[str, npt.NDArray[np.float32]]


def checkpoint_cost(checkpoint: Checkpoint) -> int:
    """Cost of a model per token, as the number of weights in its matrix products.

    A tied embedding counts as the head; an untied one is only a lookup.
    """
    lookup_only = checkpoint.embedding if LM_HEAD in checkpoint.tensors else None
    return sum(
        int(np.prod(tensor.shape))
        for tensor in checkpoint.tensors.values()
        if len(tensor.shape) >= 2 and tensor != lookup_only
    )


def make_drafter_config(
    target: Mapping[str, Any], target_cost: int, *, ranks: int
) -> dict[str, Any]:
    """Config of the largest drafter within MAX_COST_SHARE of the target, or of the smallest one."""
    text = target.get("text_config", target)
    configs = [_config(text, hidden) for hidden in HIDDEN_SIZES]
    fitting = [config for config in configs if config["num_key_value_heads"] % ranks == 0]
    affordable = [
        config for config in fitting if config_cost(config) <= MAX_COST_SHARE * target_cost
    ]
    return affordable[-1] if affordable else fitting[0]


def config_cost(config: Mapping[str, Any]) -> int:
    shapes = _shapes(config).values()
    return sum(int(np.prod(shape)) for shape in shapes if len(shape) == 2)


def write_random_model(folder: Path, config: Mapping[str, Any]) -> None:
    rng = np.random.default_rng(INIT_SEED)
    tensors: Tensors = {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else rng.normal(scale=INIT_STD, size=shape).astype(np.float32)
        for name, shape in _shapes(config).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _config(target: Mapping[str, Any], hidden: int) -> dict[str, Any]:
    """Config of a Qwen3 drafter with the given hidden size.

    Positions extend beyond the target's, because drafts follow the last served token.
    """
    head_dim = 32 if hidden < 256 else 64
    heads = hidden // head_dim
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "float32",
        "vocab_size": target["vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        "max_position_embeddings": target["max_position_embeddings"] + MAX_DRAFT_TOKENS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": target.get("bos_token_id"),
        "eos_token_id": target.get("eos_token_id"),
    }


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config["head_dim"]
    width = config["num_attention_heads"] * head
    of_layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (width, hidden),
        "self_attn.k_proj": (width, hidden),
        "self_attn.v_proj": (width, hidden),
        "self_attn.o_proj": (hidden, width),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    layers = {
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(config["num_hidden_layers"])
        for name, shape in of_layer.items()
    }
    embedding = {f"model.{EMBEDDING}": (config["vocab_size"], hidden)}
    return embedding | layers | {"model.norm.weight": (hidden,)}


def open_drafter_dir(
    directory: Path, initial: Path | None, target: Path, served: Checkpoint, *, ranks: int
) -> DrafterDir:
    """Open the drafter directory of a target model, with the drafter of an earlier run if any.

    `initial` is a model directory, or None for random initialization. The directory name is a
    digest of the target's configuration and of the initial drafter. Raises StartFailed if the two
    are incompatible.
    """
    config = _read_config(target)
    if initial is not None:
        _check_vocabulary(config, _read_config(initial), initial)
        return DrafterDir(
            directory, _digest(config, _fingerprint(initial)), lambda to: _copy(initial, to)
        )
    new_config = make_drafter_config(config, checkpoint_cost(served), ranks=ranks)
    return DrafterDir(
        directory, _digest(config, new_config), lambda to: write_random_model(to, new_config)
    )


def _read_config(model: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise StartFailed(f"{model} is not a model directory: {error}") from error
    return config


def _check_vocabulary(target: dict[str, Any], drafter: dict[str, Any], initial: Path) -> None:
    sizes = [config.get("text_config", config).get("vocab_size") for config in (target, drafter)]
    if sizes[0] != sizes[1]:
        raise StartFailed(f"vocabulary of drafter {initial}: {sizes[1]} tokens, model: {sizes[0]}")
    if not (initial / SINGLE_FILE).is_file():
        raise StartFailed(f"drafter {initial} has no {SINGLE_FILE}, which must be unsharded")


def _fingerprint(initial: Path) -> dict[str, Any]:
    state = (initial / SINGLE_FILE).stat()
    return {
        "path": str(initial.resolve()),
        "bytes": state.st_size,
        "changed": state.st_mtime_ns,
        "config": _read_config(initial),
    }


def _digest(target: dict[str, Any], drafter: dict[str, Any]) -> str:
    text = json.dumps([target, drafter], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _copy(initial: Path, to: Path) -> None:
    to.mkdir(exist_ok=True)
    for name in ("config.json", SINGLE_FILE):
        shutil.copyfile(initial / name, to / name)

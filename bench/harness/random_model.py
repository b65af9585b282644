"""Models for benchmarks: random weights in a published shape, or the enlarged bundled model.

    python -m bench.harness.random_model qwen3-1.7b --out DIRECTORY [--seed N]

The time of a step does not depend on the values of the weights. The tokenizer is the bundled small
model's, so benchmarks send token ids. Activations stay of order one in every layer.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

SEEDLING: Final = Path(__file__).parents[2] / "examples" / "seedling" / "model"
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_QWEN3: Final[dict[str, Any]] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "qwen3-1.7b": _QWEN3
    | {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    # A drafter for the shape above, and a model that a CPU runs in a test.
    "qwen3-drafter": _QWEN3
    | {
        "vocab_size": 151936,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "tiny": _QWEN3
    | {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "tiny-drafter": _QWEN3
    | {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    },
} | {
    # Small layers with the bundled tokenizer, of which publication benchmarks need any number.
    name: _QWEN3
    | {
        "vocab_size": 512,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "head_dim": 64,
    }
    for name, hidden, num_layers in (
        ("2m", 256, 3),
        ("25m", 512, 8),
        ("100m", 512, 32),
        ("600m", 1024, 48),
    )
}


def write_model(directory: Path, shape: str, *, seed: int = 0) -> Path:
    """Write the model unless it is there; the last file written is the configuration."""
    if (directory / "config.json").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    config = SHAPES[shape]
    tensors = dict(_tensors(config, torch.Generator().manual_seed(seed)))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    for name in TOKENIZER_FILES:
        shutil.copy(SEEDLING / name, directory / name)
    (directory / "config.json").write_text(json.dumps(dict(config), indent=2))
    return directory


def _tensors(
    config: Mapping[str, Any], generator: torch.Generator
) -> Iterator[tuple[str, torch.Tensor]]:
    """Matrices with a standard deviation of one over the square root of their input size."""
    hidden = config["hidden_size"]

    def matrix(outputs: int, inputs: int) -> torch.Tensor:
        drawn = torch.randn(outputs, inputs, generator=generator, dtype=torch.float32)
        return drawn.div_(inputs**0.5).bfloat16()

    def gains(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    yield "model.embed_tokens.weight", matrix(config["vocab_size"], hidden)
    yield "model.norm.weight", gains(hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, (outputs, inputs) in _matrices(config).items():
            yield f"{prefix}{name}.weight", matrix(outputs, inputs)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", gains(hidden)
        for name in ("q_norm", "k_norm"):
            yield f"{prefix}self_attn.{name}.weight", gains(config["head_dim"])


def _matrices(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Sizes [outputs, inputs] of the matrices of one layer."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries, keys = (
        config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads")
    )
    return {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def enlarged_seedling(folder: Path) -> Path:
    """Directory of the bundled model, enlarged to 25M parameters in a process of its own."""
    model = folder / "25m"
    program = [sys.executable, "-m", "examples.seedling.enlarge"]
    subprocess.run([*program, "--to", "25m", "--out", str(model)], check=True)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(f"wrote {write_model(arguments.out, arguments.shape, seed=arguments.seed)}")


if __name__ == "__main__":
    main()

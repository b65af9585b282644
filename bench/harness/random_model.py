"""Models for benchmarks: random weights in a published shape, or the enlarged bundled model.

    python -m bench.harness.random_model SHAPE --out DIRECTORY [--seed N] [--equal-layers]

The time of a step does not depend on the values of the weights. Activations stay of order one in
every layer. The tokenizer is the bundled small model's, with a word for each further id of the
vocabulary: an incremental decoder keeps ids without text, and takes longer for each further one.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import Any, Final

import torch

from coppice.safetensors_io import header_of
from coppice.weights.tensor_serialization import FROM_TORCH, tensors_of

SEEDLING: Final = Path(__file__).parents[2] / "examples" / "seedling" / "model"
COPIED_FILES: Final = ("tokenizer_config.json", "chat_template.jinja")
WORD_LETTERS: Final = 4
LAYER_OUTPUTS: Final = ("o_proj.weight", "down_proj.weight")
REPEATING_SCALE: Final = 0.01
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
    "qwen3-8b": _QWEN3
    | {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    # A drafter for the first shape, and a model that a CPU runs in a test.
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


def write_model(
    directory: Path,
    shape: str,
    *,
    seed: int = 0,
    equal_layers: bool = False,
    repeats: bool = False,
) -> Path:
    """Write the model unless it is there; the last file written is the configuration.

    `equal_layers` draws the first layer only, which is faster, and writes it for all. `repeats`
    scales the layers' outputs down, so that with tied embeddings each token is very probably the
    one before: models of all sizes then predict the same text.
    """
    if (directory / "config.json").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    config = SHAPES[shape]
    assert config["tie_word_embeddings"] or not repeats, "the head has values of its own"
    generator = torch.Generator().manual_seed(seed)
    scale = REPEATING_SCALE if repeats else 1.0
    tensors = _tensors(config, generator, equal_layers=equal_layers, output_scale=scale)
    _write_tensors(directory / "model.safetensors", tensors)
    for name in COPIED_FILES:
        shutil.copy(SEEDLING / name, directory / name)
    write_tokenizer(directory / "tokenizer.json", config["vocab_size"])
    (directory / "config.json").write_text(json.dumps(dict(config), indent=2))
    return directory


def write_tokenizer(file: Path, vocab_size: int) -> None:
    """Write the bundled model's tokenizer, with words that no text is encoded to."""
    tokenizer = json.loads((SEEDLING / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {_word(number): number for number in range(len(vocabulary), vocab_size)}
    file.write_text(json.dumps(tokenizer))


def _word(number: int) -> str:
    """A space, as byte-level BPE writes it, and the number in letters."""
    digits = (number // 26**place % 26 for place in reversed(range(WORD_LETTERS)))
    return "\u0120" + "".join(ascii_lowercase[digit] for digit in digits)


def _write_tensors(file: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write one tensor after another, as safetensors cannot if some are equal in memory."""
    written = [tensors_of({name: tensor})[0] for name, tensor in tensors]
    with file.open("wb") as output:
        output.write(header_of(written, FROM_TORCH))
        for tensor in written:
            output.write(tensor.load().data)


def _tensors(
    config: Mapping[str, Any],
    generator: torch.Generator,
    *,
    equal_layers: bool,
    output_scale: float,
) -> Iterator[tuple[str, torch.Tensor]]:
    drawn: dict[str, torch.Tensor] = {}
    for name, shape in tensor_shapes(config):
        source = re.sub(r"layers\.\d+", "layers.0", name) if equal_layers else name
        if source not in drawn:
            scale = output_scale if name.endswith(LAYER_OUTPUTS) else 1.0
            drawn[source] = _drawn(shape, generator, scale)
        yield name, drawn[source]


def _drawn(shape: Sequence[int], generator: torch.Generator, scale: float) -> torch.Tensor:
    """Gains of one, or a matrix with a deviation of `scale` over the square root of its inputs."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float32)
    return drawn.mul_(scale / shape[1] ** 0.5).bfloat16()


def tensor_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a model's tensors; matrices are [outputs, inputs]."""
    hidden, embedding = config["hidden_size"], (config["vocab_size"], config["hidden_size"])
    yield "model.embed_tokens.weight", embedding
    yield "model.norm.weight", (hidden,)
    for number in range(config["num_hidden_layers"]):
        for name, shape in _layer_shapes(config).items():
            yield f"model.layers.{number}.{name}.weight", shape
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", embedding


def _layer_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, size = (config[n] for n in ("hidden_size", "intermediate_size", "head_dim"))
    queries, keys = (size * config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    return {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_norm": (size,),
        "self_attn.k_norm": (size,),
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
    parser.add_argument("--equal-layers", action="store_true", help="draw the first layer only")
    given = parser.parse_args()
    written = write_model(given.out, given.shape, seed=given.seed, equal_layers=given.equal_layers)
    print(f"wrote {written}")


if __name__ == "__main__":
    main()

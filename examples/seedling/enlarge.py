"""Enlarges the small test model (seedling) without changing the function that it computes.

The enlarged model generates the seedling's responses at the compute cost of its own size, so a
benchmark has realistic responses and realistic step times. The seedling is the top left corner of
every matrix, and the new parameters have no effect on the residual stream:

- New layers, heads and MLP neurons have random weights, but zeros in o_proj and down_proj.
- New residual channels stay zero: zero columns in the embedding, zero rows in o_proj and down_proj.
- RMSNorm averages over all channels including the new zeros, which multiplies its result by
  sqrt(growth). The growth is a power of four. Norm weights are divided by its square root, a power
  of two, and epsilon by the growth itself, so both are exact in bfloat16, too.

Two details are not bit-exact: sums are evaluated in another order, and the norms of queries and
keys also use the smaller epsilon (a relative change of about 4e-7 at unit variance).
"""

import argparse
import shutil
from math import isqrt
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

SEEDLING = Path(__file__).parent / "model"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SEED = 7
_ZERO_WHERE_NEW = ("embed_tokens", "lm_head", "o_proj", "down_proj")
_RESIDUAL_NORMS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "model.norm.weight",
)


class Shape(NamedTuple):
    """Dimensions of the enlarged model, with two query heads per KV head like the seedling."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int


SHAPES = {
    "25m": Shape(768, 1408, 5, 12, 6),
    "100m": Shape(768, 2304, 14, 12, 6),
}


def grow(model: Qwen3ForCausalLM, shape: Shape) -> Qwen3ForCausalLM:
    """Returns a larger model that computes the same function, in the same dtype."""
    growth = _growth(model.config, shape)
    grown = _random(_grown_config(model.config, shape, growth)).to(model.dtype)
    old = dict(model.named_parameters())
    with torch.no_grad():
        for name, target in grown.named_parameters():
            if any(part in name for part in _ZERO_WHERE_NEW):
                target.zero_()
            if name in old:
                scale = isqrt(growth) if name.endswith(_RESIDUAL_NORMS) else 1
                corner = tuple(slice(size) for size in old[name].shape)
                target[corner] = old[name] / scale
    grown.generation_config = model.generation_config
    return grown.eval()


def untie(model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """Returns a copy of a model with an untied output head, which equals the embedding."""
    config = _config_with(model.config, tie_word_embeddings=False)
    untied = _random(config).to(model.dtype)
    untied.load_state_dict(model.state_dict())
    untied.generation_config = model.generation_config
    return untied.eval()


def _growth(old: Qwen3Config, shape: Shape) -> int:
    old_size: int = old.hidden_size
    growth, rest = divmod(shape.hidden_size, old_size)
    assert rest == 0 and growth in (1, 4, 16, 64), f"hidden size grows by powers of four: {shape}"
    old_group = old.num_attention_heads // old.num_key_value_heads
    assert shape.num_attention_heads == old_group * shape.num_key_value_heads, f"heads: {shape}"
    return growth


def _grown_config(old: Qwen3Config, shape: Shape, growth: int) -> Qwen3Config:
    return _config_with(
        old,
        rms_norm_eps=old.rms_norm_eps / growth,
        layer_types=["full_attention"] * shape.num_hidden_layers,
        **shape._asdict(),
    )


def _config_with(old: Qwen3Config, **changes: object) -> Qwen3Config:
    return Qwen3Config.from_dict({**old.to_dict(), **changes})


def _random(config: Qwen3Config) -> Qwen3ForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        return Qwen3ForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Enlarges the seedling without changing the function that it computes."
    )
    parser.add_argument("--to", choices=sorted(SHAPES), help="default: the seedling's size")
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    parser.add_argument(
        "--untie", action="store_true", help="untie the output head from the embedding"
    )
    parser.add_argument("--model", type=Path, default=SEEDLING, help="model to start from")
    args = parser.parse_args()
    model = Qwen3ForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    if args.to:
        model = grow(model, SHAPES[args.to])
    if args.untie:
        model = untie(model)
    model.save_pretrained(args.out)
    for name in TOKENIZER_FILES:
        shutil.copy(args.model / name, args.out / name)
    print(f"{args.out}: {model.num_parameters():,} parameters")


if __name__ == "__main__":
    main()

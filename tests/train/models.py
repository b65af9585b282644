"""Tiny models, groups of random tokens, and the distance of gradients."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from coppice.train import LossFunction, RowLogprobs, TrainingGroup, grpo_loss, token_mean
from coppice.train.losses import Totals

VOCABULARY = 97
LENGTHS = (17, 33, 5, 48, 48, 1, 29, 40)
Gradients = dict[str, Tensor]

_FAMILIES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}


def tiny_model(
    family: str = "qwen3",
    *,
    kv_heads: int = 2,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **options: Any,
) -> Any:
    """A model with 3 layers and 4 query heads, in training mode."""
    torch.manual_seed(seed)
    config_class, model_class = _FAMILIES[family]
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        # Large enough that attention is far from uniform and depends on the prompt.
        "initializer_range": 0.2,
    }
    return model_class(config_class(**settings | options)).to(dtype).train()


def random_group(
    lengths: Sequence[int] = LENGTHS, *, prompt_tokens: int = 61, seed: int = 1
) -> TrainingGroup:
    """A group with random sampling logprobs, not those of any model."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(length: int) -> Tensor:
        return torch.randint(0, VOCABULARY, (length,), generator=generator)

    return TrainingGroup(
        prompt=tokens(prompt_tokens),
        responses=tuple(tokens(length) for length in lengths),
        logprobs=tuple(-3 + torch.randn(length, generator=generator) for length in lengths),
    )


def random_loss(group: TrainingGroup, *, seed: int = 2) -> LossFunction:
    """Clipped GRPO with random advantages and ratios other than one."""
    generator = torch.Generator().manual_seed(seed)
    advantages_G = torch.randn(len(group.responses), generator=generator)
    shifts = [0.2 * torch.randn(n, generator=generator) for n in group.target_lengths]
    weights = token_mean(Totals.of([group]))

    def loss(rows: RowLogprobs) -> Tensor:
        # Old logprobs at a fixed distance from the current ones of any model.
        old_T = rows.logprobs.detach() + rows.pick(shifts)
        old = list(torch.split(old_T, list(rows.lengths)))
        placed = dict(zip(rows.rows, old, strict=True))
        everywhere = [placed.get(row, old[0][:0]) for row in range(len(group.responses))]
        return grpo_loss(rows, advantages=advantages_G, weights=weights, old=everywhere)

    return loss


def gradients(model: Any) -> Gradients:
    """Gradients, moved out of the model. A weight that does not affect the loss has none."""
    taken = {
        name: parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    return taken


def error(found: Gradients, exact: Gradients) -> float:
    """Relative L2 distance over all weights."""
    assert found.keys() == exact.keys()
    difference = sum((found[name].double() - exact[name].double()).square().sum() for name in exact)
    total = sum(exact[name].double().square().sum() for name in exact)
    return float((difference / total) ** 0.5)

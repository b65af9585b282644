"""Generates responses with a Hugging Face model from a prompt's KV cache, sped up by a draft.

Many draft tokens are verified at once, as in speculative decoding, so an answer costs one forward
per token that differs from the draft. The generated tokens do not depend on the draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPrompt:
    """A prompt, as the KV cache of all its tokens but the last, and the last token."""

    cache: DynamicCache
    last: int


def log_probabilities(model: Any, prompted: CachedPrompt, response: Sequence[int]) -> torch.Tensor:
    """Log-probabilities [T + 1, V] at a response's tokens and at the position after them."""
    tokens = torch.tensor([[prompted.last, *response]])
    with torch.inference_mode():
        logits: torch.Tensor = model(tokens, past_key_values=_copy(prompted.cache)).logits[0]
    return logits.log_softmax(-1)


def generate(
    model: Any,
    prompted: CachedPrompt,
    noise: torch.Tensor,
    *,
    draft: Sequence[int],
    end: int,
) -> list[int]:
    """Generate until the token `end`, or as many tokens as the given noise has rows.

    A token is the argmax of logits plus noise: zeros make it greedy, Gumbel noise a sample at
    temperature 1. The same noise gives the same choices wherever distributions are equal.
    """
    cache, last, said = _copy(prompted.cache), prompted.last, list[int]()
    while len(said) < len(noise) and end not in said:
        guess = draft[len(said) : len(noise) - 1]
        chosen = _choose(model, cache, [last, *guess], noise[len(said) :])
        right = _matching_prefix(chosen, guess)
        if right < len(guess):
            cache.crop(right - len(guess))
        said += chosen[: right + 1]
        last = said[-1]
    return said[: said.index(end) + 1] if end in said else said


def _choose(
    model: Any, cache: DynamicCache, tokens: Sequence[int], noise: torch.Tensor
) -> list[int]:
    with torch.inference_mode():
        logits = model(torch.tensor([tokens]), past_key_values=cache).logits[0]
    chosen: list[int] = (logits + noise[: len(tokens)]).argmax(-1).tolist()
    return chosen


def _matching_prefix(chosen: Sequence[int], guess: Sequence[int]) -> int:
    pairs = enumerate(zip(chosen, guess, strict=False))
    return next((at for at, (one, other) in pairs if one != other), len(guess))


def _copy(cache: DynamicCache) -> DynamicCache:
    return DynamicCache([(layer.keys, layer.values) for layer in cache.layers])

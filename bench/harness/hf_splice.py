"""Reference implementation, in Hugging Face, of prompts spliced from cached spans.

Mirrors what the engine's chain computes, written for simplicity, and gives access to whole
distributions.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from coppice.wire.rollouts import PromptSpan
from kernels.rope_shift import parse_rotary, shift_keys
from service.kv.spans.prompt_template import joined
from service.kv.spans.spliced_prompt import TokenRun, token_runs


class HfAssembler:
    """Splices prompts for one float32 model from spans, each of which is prefilled once, alone."""

    def __init__(self, model: Any, *, block: int = 32) -> None:
        self._model, self._block = model, block
        config = model.config
        self._rotary = parse_rotary(config.rope_parameters, config.head_dim)
        self._kept: dict[tuple[int, ...], list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def dense(self, prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
        """Log-probabilities [T, V] at a response's tokens after a fully prefilled prompt."""
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([[*prompt, *response]])).logits[0]
        return logits[len(prompt) - 1 : -1].log_softmax(-1)

    def assemble(
        self, parts: Sequence[PromptSpan], response: Sequence[int], *, recompute_tokens: int
    ) -> torch.Tensor:
        """Log-probabilities [T, V] at a response's tokens after a spliced prompt."""
        cache = self.cache(parts, recompute_tokens=recompute_tokens)
        tokens = torch.tensor([[joined(parts)[-1], *response]])
        with torch.inference_mode():
            logits: torch.Tensor = self._model(tokens, past_key_values=cache).logits[0]
        return logits[:-1].log_softmax(-1)

    def cache(self, parts: Sequence[PromptSpan], *, recompute_tokens: int) -> DynamicCache:
        """KV cache of all tokens but the last of a prompt, spliced as the engine does."""
        runs = token_runs(parts, recompute_tokens=recompute_tokens, block=self._block)
        return self._filled(parts, runs)

    def computed_cache(self, parts: Sequence[PromptSpan]) -> DynamicCache:
        """KV cache of all tokens but the last of a prompt, fully prefilled."""
        return self._filled(parts, [TokenRun(start=0, end=len(joined(parts)))])

    def _filled(self, parts: Sequence[PromptSpan], runs: Sequence[TokenRun]) -> DynamicCache:
        prompt, cache = joined(parts)[:-1], DynamicCache(config=self._model.config)
        # The first span is an exact prefix and the most expensive one, so it is cached too.
        begun = len(parts[0].token_ids) if len(parts) > 1 else 0
        with torch.inference_mode():
            if begun:
                self._place(parts[0], TokenRun(start=0, end=begun), cache)
            for run in runs:
                if run.span is not None:
                    self._place(parts[run.span], run, cache)
                elif tokens := prompt[max(run.start, begun) : run.end]:
                    self._model(torch.tensor([tokens]), past_key_values=cache)
        return cache

    def _place(self, span: PromptSpan, run: TokenRun, cache: DynamicCache) -> None:
        taken = slice(run.start - run.origin, run.end - run.origin)
        for layer, (keys, values) in enumerate(self._alone(span.token_ids)):
            moved = shift_keys(keys[:, :, taken], run.origin, self._rotary)
            cache.update(moved, values[:, :, taken], layer)

    def _alone(self, token_ids: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        key = tuple(token_ids)
        if key not in self._kept:
            cache = self._model(torch.tensor([list(key)]), use_cache=True).past_key_values
            self._kept[key] = [(layer.keys, layer.values) for layer in cache.layers]
        return self._kept[key]


def divergence(exact: torch.Tensor, approximate: torch.Tensor) -> float:
    """KL divergence of approximate from exact distributions, mean over positions, in nats."""
    return float((exact.exp() * (exact - approximate)).sum(-1).mean())

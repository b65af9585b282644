"""Trainer of the GRPO example: exact gradients in float32, with one prefill per prompt."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from coppice.train import Totals, TrainingGroup, advantages, grouped_backward, grpo_loss, token_mean
from examples.seedling.enlarge import SEEDLING

MAX_NORM = 1.0


class Learner:
    """Policy model and optimizer; a training step is `gradients` or `backward`, then `update`.

    The weights are float32; the server gets them in bfloat16.
    """

    def __init__(self, learning_rate: float) -> None:
        self.model = Qwen3ForCausalLM.from_pretrained(SEEDLING, dtype=torch.float32).train()
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    def gradients(self, groups: Sequence[TrainingGroup], rewards: Sequence[Tensor]) -> None:
        self.backward(groups, list(map(advantages, rewards)))

    def backward(self, groups: Sequence[TrainingGroup], gains_of: Sequence[Tensor]) -> None:
        """Adds the gradients of some groups, given the advantage of each of their responses."""
        weights = token_mean(Totals.of(groups))
        for group, gains in zip(groups, gains_of, strict=True):
            if not gains.any():
                continue  # all samples have the same reward, so the gradient is zero
            loss = partial(grpo_loss, advantages=gains, weights=weights, sampled=group.logprobs)
            grouped_backward(self.model, group, loss)

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        """Policy weights in bfloat16 by their names in a checkpoint; tied weights occur once."""
        parameters = self.model.named_parameters()
        return {name: parameter.detach().bfloat16() for name, parameter in parameters}

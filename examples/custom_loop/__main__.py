"""Trains the bundled small model with GRPO: `python -m examples.custom_loop URL`."""

import random
import sys
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from coppice import Group, Rollouts, WeightsConstraint
from coppice.train import Totals, TrainingGroup, advantages, grouped_backward, grpo_loss, token_mean
from examples.seedling import arithmetic
from examples.seedling.enlarge import SEEDLING

NUM_STEPS, NUM_PROMPTS, NUM_SAMPLES = 3, 8, 8
TOKENIZER = AutoTokenizer.from_pretrained(SEEDLING)


def rewards_of(prompt: str, group: Group) -> torch.Tensor:
    texts = [TOKENIZER.decode(s.token_ids, skip_special_tokens=True) for s in group.samples]
    return torch.tensor([arithmetic.reward(prompt, text) for text in texts])


def backward(model: Any, groups: list[TrainingGroup], rewards: list[torch.Tensor]) -> None:
    weights = token_mean(Totals.of(groups))
    for group, rewards_G in zip(groups, rewards, strict=True):
        gains = advantages(rewards_G)
        loss = partial(grpo_loss, advantages=gains, weights=weights, sampled=group.logprobs)
        grouped_backward(model, group, loss)


def main(url: str) -> None:
    rng = random.Random(1)
    model = AutoModelForCausalLM.from_pretrained(SEEDLING, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with Rollouts(url) as rollouts:
        status = rollouts.status()
        version = status.weights_version
        for step in range(1, NUM_STEPS + 1):
            prompts = [arithmetic.draw(rng, held_out=False).prompt for _ in range(NUM_PROMPTS)]
            token_ids = [TOKENIZER.encode(prompt) for prompt in prompts]
            on_policy = WeightsConstraint(exact_version=version)
            result = rollouts.rollout(
                token_ids, n=NUM_SAMPLES, max_tokens=128, seed=step, weights=on_policy
            )
            rewards = list(map(rewards_of, prompts, result.groups))
            backward(model, list(map(TrainingGroup.of, token_ids, result.groups)), rewards)
            optimizer.step()
            optimizer.zero_grad()
            version = f"loop-{status.weights_sequence + step}"
            state = {name: weight.bfloat16() for name, weight in model.state_dict().items()}
            rollouts.publish_weights(version, state)
            print(f"step {step}: mean reward {torch.stack(rewards).mean():.2f}, serving {version}")


if __name__ == "__main__":
    main(sys.argv[1])

"""Trains the bundled small model with TRL: `python -m examples.trl URL`."""

import sys

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from coppice import Rollouts
from coppice.integrations.trl import rollout_func
from examples.seedling import arithmetic
from examples.seedling.enlarge import SEEDLING


def main(url: str) -> None:
    prompts = ["Compute 12+34.\n", "Compute 7*8.\n", "Compute 90-41.\n", "Compute 3*9+5.\n"]
    trainer = GRPOTrainer(
        model=str(SEEDLING),
        reward_funcs=lambda prompts, completions, **_: list(
            map(arithmetic.reward, prompts, completions)
        ),
        args=GRPOConfig("build/trl", max_steps=3, use_cpu=True, bf16=False, save_strategy="no"),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        rollout_func=rollout_func(Rollouts(url)),
    )
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1])

"""Checkpoints of the GRPO example for benchmarks of weights updates."""

from pathlib import Path
from shutil import copytree
from typing import Final

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from coppice import Rollouts
from examples.grpo.learner import Learner
from examples.grpo.loop import Loop
from examples.grpo.questions import Questions
from examples.grpo.server import serving
from examples.seedling.enlarge import SEEDLING

INITIAL: Final = "step-0"
LEARNING_RATE, GROUPS, MAX_TOKENS = 1e-4, 16, 256


def checkpoints(num_updates: int, directory: Path) -> dict[str, Path]:
    """Checkpoints of the first steps of the GRPO example, which runs if the directory lacks one."""
    found = {f"step-{step}": directory / f"step-{step}" for step in range(1, num_updates + 1)}
    if not all(path.exists() for path in found.values()):
        train(num_updates, directory)
    return {INITIAL: SEEDLING} | found


def train(num_steps: int, directory: Path) -> None:
    torch.manual_seed(0)
    learner = Learner(LEARNING_RATE)
    questions = Questions(AutoTokenizer.from_pretrained(SEEDLING), seed=1, num_held_out=1)
    folder = directory / "server"
    folder.mkdir(parents=True)
    with serving(folder, cpu_threads=1, seed=1) as url, Rollouts(url) as rollouts:
        loop = Loop(rollouts, learner, questions, groups=GROUPS, max_tokens=MAX_TOKENS)
        for step in loop.steps(num_steps):
            path = copytree(SEEDLING, directory / "unfinished")
            save_file(learner.weights(), path / "model.safetensors", metadata={"format": "pt"})
            path.rename(directory / f"step-{step.number}")

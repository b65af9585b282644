"""`make demo`: serves a small test model, trains it with GRPO, and plots the results.

    python -m examples.grpo [--seed 1] [--steps 40] [--out build/demo]

The exit status is 1 if the held-out reward has not risen significantly.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoTokenizer

from coppice import Rollouts
from examples.grpo.history import WINDOW, Step, compute_gain, save, table
from examples.grpo.learner import Learner
from examples.grpo.loop import Loop
from examples.grpo.picture import draw
from examples.grpo.questions import Questions
from examples.grpo.server import serving
from examples.seedling.enlarge import SEEDLING


def main() -> int:
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    steps = _train(options)
    save(steps, options.out / "steps.json")
    gain = compute_gain(steps)
    draw(steps, gain, options.out / "demo.png")
    print(f"\n{table(steps)}\n\n{gain}")
    print(f"{time.monotonic() - began:.0f} s in all; the picture is {options.out / 'demo.png'}")
    return 0 if gain.learned else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains the seedling with GRPO.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=16, help="training groups per step")
    parser.add_argument("--held-out", type=int, default=48, help="held-out questions per step")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--out", type=Path, default=Path("build/demo"))
    options = parser.parse_args()
    if options.steps < 2 * WINDOW:
        parser.error(f"--steps must be at least {2 * WINDOW}: the last {WINDOW} are compared")
    return options


def _train(options: argparse.Namespace) -> list[Step]:
    """Runs the training; engine and trainer run concurrently and get half of the cores each."""
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // 2))
    torch.manual_seed(options.seed)
    words = AutoTokenizer.from_pretrained(SEEDLING)
    questions = Questions(words, seed=options.seed, num_held_out=options.held_out)
    learner = Learner(options.learning_rate)
    print("starting the server", file=sys.stderr)
    with (
        serving(options.out, cpu_threads=max(1, cores - cores // 2), seed=options.seed) as url,
        Rollouts(url) as rollouts,
        tqdm(total=options.steps, unit="step") as bar,
    ):
        loop = Loop(
            rollouts, learner, questions, groups=options.groups, max_tokens=options.max_tokens
        )
        steps = []
        for step in loop.steps(options.steps):
            steps.append(step)
            bar.set_postfix_str(f"held-out reward {step.held_out_reward:.2f}")
            bar.update()
    return steps


if __name__ == "__main__":
    sys.exit(main())

"""Trains a draft model, of a tenth of the target's size, for the small test model (seedling).

The draft model is for the setting `speculation.drafter`. The training data are solutions in the
seedling's two formats, in the proportion in which the seedling uses them. A server trains its draft
model on actual samples and does not need this; it only provides a high acceptance rate from the
start.
"""

import argparse
import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.drafter.service.initial_model import (
    checkpoint_cost,
    make_drafter_config,
    write_random_model,
)
from engine.drafter.trainer.messages import Sample
from engine.drafter.trainer.model_trainer import ModelTrainer
from engine.drafter.trainer.packing import pack
from engine.weights.checkpoint import read_base_checkpoint
from examples.seedling import arithmetic

SEEDLING = Path(__file__).parent / "model"
AT_ONCE_SHARE = 0.5
NUM_STEPS = 1000
SEED = 11
LOG_EVERY_STEPS = 100

Solve = Callable[[arithmetic.Problem], str]


def samples(
    words: PreTrainedTokenizerFast, *, seed: int, written_out: Solve = arithmetic.written_out
) -> Callable[[], Sample]:
    """Returns a function that draws a random problem with a solution, as a training sample."""
    rng = random.Random(seed)

    def draw() -> Sample:
        problem = arithmetic.draw(rng, held_out=False)
        solve = arithmetic.at_once if rng.random() < AT_ONCE_SHARE else written_out
        response = words.encode(solve(problem)) + [words.eos_token_id]
        return Sample(version="taught", prompt=words.encode(problem.prompt), response=response)

    return draw


def fit(model: Path, out: Path, *, num_steps: int) -> None:
    target = json.loads((model / "config.json").read_text())
    write_random_model(
        out, make_drafter_config(target, checkpoint_cost(read_base_checkpoint(model)), ranks=1)
    )
    model_trainer = ModelTrainer(out)
    draw = samples(AutoTokenizer.from_pretrained(model), seed=SEED)
    began = time.monotonic()
    for step in range(1, num_steps + 1):
        model_trainer.step(pack(draw))
        if step % LOG_EVERY_STEPS == 0:
            seconds = time.monotonic() - began
            print(
                f"step {step}  loss {model_trainer.loss_tracker.smoothed:.3f}  {seconds:.0f} s",
                flush=True,
            )
    model_trainer.write_drafter(out / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, out / name)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a drafter for the seedling.")
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    parser.add_argument("--model", type=Path, default=SEEDLING, help="target model")
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    fit(args.model, args.out, num_steps=args.steps)


if __name__ == "__main__":
    main()

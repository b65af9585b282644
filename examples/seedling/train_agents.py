"""Trains the small test model (seedling) further on the task of multi_agent_task.py.

Prompt lengths grow from about 70 to about 1,050 tokens during the run, and remain mixed. Each
prompt is followed by several questions with answers, since the shared prompt dominates the cost.
"""

import argparse
import math
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.seedling import batches, multi_agent_task, tokenizer, train
from examples.seedling.enlarge import SEEDLING

SEED = 7
NUM_STEPS = 1000
TOKENS_PER_BATCH = 2048
LEARNING_RATE = 2e-3
NUM_LATER = 6
POOL_TURNS = 64


def longest_at(done: float) -> float:
    """Prompt-length curriculum: maximum relative size after the fraction `done` of the training.

    A size of 1 means five agents and a thousand tokens. The model must learn to look up numbers in
    short prompts first; otherwise it never learns to.
    """
    return min(1.0, 0.1 + 1.8 * max(0.0, done - 0.2))


def shape_of(rng: random.Random, longest: float) -> multi_agent_task.Shape:
    size = longest * math.sqrt(rng.random())
    share_of_own = 1.0 if rng.random() < 0.5 else rng.random()
    return multi_agent_task.Shape(
        num_peers=rng.randint(2, 4),
        own=int(680 * size * share_of_own),
        steps=1 + round(8 * size),
    )


def stream(words: PreTrainedTokenizerFast, *, seed: int, num_steps: int) -> Iterator[batches.Batch]:
    """Endless stream of multi-agent training batches, whose prompts grow over `num_steps` steps.

    A batch has at most TOKENS_PER_BATCH tokens and no held-out questions.
    """
    rng = random.Random(seed)
    drawn = 0

    def pool() -> list[batches.Example]:
        nonlocal drawn
        longest = longest_at(drawn / (num_steps * TOKENS_PER_BATCH))
        examples = [_draw(rng, words, longest) for _ in range(POOL_TURNS)]
        drawn += sum(len(example.tokens) for example in examples)
        return examples

    return batches.pooled(pool, rng, tokens_per_batch=TOKENS_PER_BATCH, pad=words.pad_token_id)


def _draw(rng: random.Random, words: PreTrainedTokenizerFast, longest: float) -> batches.Example:
    turn = multi_agent_task.draw(rng, shape_of(rng, longest), held_out=False, num_later=NUM_LATER)
    example = batches.Example(tokens=[], labels=[])
    prompts = [turn.prompt, *(f"\nquestion {asked}.\n{turn.ask}" for asked in turn.later)]
    for text, asked in zip(prompts, (turn.question, *turn.later), strict=True):
        prompt = words.encode(text)
        response = [*words.encode(asked.written_out), words.eos_token_id]
        example.tokens.extend(prompt + response)
        example.labels.extend([batches.IGNORED] * len(prompt) + response)
    return example


def reset_embeddings(model: Qwen3ForCausalLM, words: PreTrainedTokenizerFast) -> None:
    """Randomizes the embeddings of agent names and of the word "question".

    These tokens do not occur in arithmetic solutions. Training pushed all of them in the same
    direction, so the seedling cannot distinguish them.
    """
    embedding, known = model.get_input_embeddings().weight, words.encode("0123456789+-*=")
    rows = sorted(set(words.encode(f"question{multi_agent_task.AGENTS}")))
    with torch.no_grad():
        embedding[rows] = torch.randn_like(embedding[rows]) * embedding[known].std()


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the seedling on the multi-agent task.")
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    parser.add_argument("--start", type=Path, default=SEEDLING, help="model to continue from")
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    model = Qwen3ForCausalLM.from_pretrained(args.start, dtype=torch.float32)
    words = tokenizer.build()
    reset_embeddings(model, words)
    batches_of_run = stream(words, seed=SEED, num_steps=args.steps)
    train.train(model.train(), batches_of_run, args.steps, args.learning_rate)
    train.save(model, words, args.out)


if __name__ == "__main__":
    main()

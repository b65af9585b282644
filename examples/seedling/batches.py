"""The endless stream of training batches: prompts with their solutions, grouped by length.

Rows are padded on the right. Under a causal mask nothing that counts sees the padding, so a batch
needs no attention mask. Shape suffixes: B rows, T tokens.
"""

import random
from collections.abc import Iterator
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerFast

from examples.seedling import arithmetic

IGNORED = -100
POOL_EXAMPLES = 2048


class Batch(NamedTuple):
    tokens_BT: torch.Tensor
    labels_BT: torch.Tensor  # IGNORED at the prompt and the padding


class Example(NamedTuple):
    tokens: list[int]
    num_prompt_tokens: int


def stream(
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int,
    tokens_per_batch: int,
    at_once_share: float,
) -> Iterator[Batch]:
    """Batches of at most `tokens_per_batch` tokens, padding counted, from problems not held out."""
    rng = random.Random(seed)
    while True:
        pool = [_draw(rng, tokenizer, at_once_share) for _ in range(POOL_EXAMPLES)]
        batches = _by_length(pool, tokens_per_batch)
        rng.shuffle(batches)
        yield from (_pad(batch, tokenizer.pad_token_id) for batch in batches)


def _draw(rng: random.Random, tokenizer: PreTrainedTokenizerFast, at_once_share: float) -> Example:
    problem = arithmetic.draw(rng, held_out=False)
    solve = arithmetic.at_once if rng.random() < at_once_share else arithmetic.written_out
    prompt = tokenizer.encode(problem.prompt)
    return Example(
        tokens=prompt + tokenizer.encode(solve(problem)) + [tokenizer.eos_token_id],
        num_prompt_tokens=len(prompt),
    )


def _by_length(pool: list[Example], tokens_per_batch: int) -> list[list[Example]]:
    batches: list[list[Example]] = [[]]
    for example in sorted(pool, key=lambda example: len(example.tokens)):
        # The newest row is the longest, so it sets the width of the batch that takes it.
        if len(example.tokens) * (len(batches[-1]) + 1) > tokens_per_batch:
            batches.append([])
        batches[-1].append(example)
    return batches


def _pad(examples: list[Example], pad: int) -> Batch:
    width = max(len(example.tokens) for example in examples)
    tokens_BT = torch.full((len(examples), width), pad, dtype=torch.int64)
    labels_BT = torch.full((len(examples), width), IGNORED, dtype=torch.int64)
    for row, (tokens, num_prompt_tokens) in enumerate(examples):
        tokens_BT[row, : len(tokens)] = torch.tensor(tokens)
        labels_BT[row, num_prompt_tokens : len(tokens)] = torch.tensor(tokens[num_prompt_tokens:])
    return Batch(tokens_BT, labels_BT)

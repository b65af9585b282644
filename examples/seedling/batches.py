"""Endless streams of training batches: arithmetic prompts with solutions, grouped by length.

Rows are padded on the right. Under a causal mask no other token reads the padding, so a batch needs
no attention mask. Shape suffixes: B rows, T tokens.
"""

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerFast

from examples.seedling import arithmetic

IGNORED = -100
POOL_EXAMPLES = 2048


class Batch(NamedTuple):
    tokens_BT: torch.Tensor
    labels_BT: torch.Tensor  # IGNORED for prompt and padding


class Example(NamedTuple):
    tokens: list[int]
    labels: list[int]  # the tokens of the response; IGNORED elsewhere


def stream(
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int,
    tokens_per_batch: int,
    at_once_share: float,
) -> Iterator[Batch]:
    """Endless stream of training batches of arithmetic problems, none of them held out.

    A batch has at most `tokens_per_batch` tokens, including padding.
    """
    rng = random.Random(seed)
    return pooled(
        lambda: [_draw(rng, tokenizer, at_once_share) for _ in range(POOL_EXAMPLES)],
        rng,
        tokens_per_batch=tokens_per_batch,
        pad=tokenizer.pad_token_id,
    )


def pooled(
    draw: Callable[[], list[Example]], rng: random.Random, *, tokens_per_batch: int, pad: int
) -> Iterator[Batch]:
    """Endless stream of batches: draws examples, groups them by length, shuffles the groups.

    `draw` returns the examples for many batches at once.
    """
    while True:
        batches = _by_length(draw(), tokens_per_batch)
        rng.shuffle(batches)
        yield from (_pad(batch, pad) for batch in batches)


def _draw(rng: random.Random, tokenizer: PreTrainedTokenizerFast, at_once_share: float) -> Example:
    problem = arithmetic.draw(rng, held_out=False)
    solve = arithmetic.at_once if rng.random() < at_once_share else arithmetic.written_out
    prompt = tokenizer.encode(problem.prompt)
    response = [*tokenizer.encode(solve(problem)), tokenizer.eos_token_id]
    return Example(tokens=prompt + response, labels=[IGNORED] * len(prompt) + response)


def _by_length(pool: list[Example], tokens_per_batch: int) -> list[list[Example]]:
    batches: list[list[Example]] = [[]]
    for example in sorted(pool, key=lambda example: len(example.tokens)):
        # Examples are sorted by length, so the last row determines the width of its batch.
        if len(example.tokens) * (len(batches[-1]) + 1) > tokens_per_batch:
            batches.append([])
        batches[-1].append(example)
    return batches


def _pad(examples: list[Example], pad: int) -> Batch:
    width = max(len(example.tokens) for example in examples)
    tokens_BT = torch.full((len(examples), width), pad, dtype=torch.int64)
    labels_BT = torch.full((len(examples), width), IGNORED, dtype=torch.int64)
    for row, (tokens, labels) in enumerate(examples):
        tokens_BT[row, : len(tokens)] = torch.tensor(tokens)
        labels_BT[row, : len(labels)] = torch.tensor(labels)
    return Batch(tokens_BT, labels_BT)

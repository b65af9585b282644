"""In bfloat16, shared-prefix attention is as close to float32 as stock attention.

Two kernels round differently, by an amount that depends on the processor's instructions. So each is
compared with a float32 forward of the same weights, rounded to bfloat16.
"""

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.attention.sample_groups import GROUP_SIZE, GROUPS, sample
from tests.engine.attention.shared_engine import SharedEngine, shared_engine
from tests.engine.random_models import VOCAB

# Imports of vLLM and its draft methods emit unrelated warnings.
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

# Prompts with different tokens, each with its own rounding: the unit of the confidence interval.
OTHERS = 8
PROMPTS = [[token + other for token in prompt] for other in range(OTHERS) for prompt in GROUPS]
CONFIDENCE = 3.0
"""Standard errors: a one-sided error of 0.1 %."""

Drawn = tuple[list[int], torch.Tensor]


def test_bfloat16_is_as_close_to_float32_as_stock_attention(
    sharp_model: Path, reference: Any, tmp_path: Path
) -> None:
    with shared_engine(
        sharp_model, tmp_path, mode="auto", dtype="bfloat16", max_logprobs=VOCAB
    ) as engine:
        with engine.mode("off"):
            stock = distributions(engine)
        with engine.mode("always") as counted:
            shared = distributions(engine)
        with engine.mode("auto") as grouping_or_reason:
            sample(engine, 8)
    assert counted["steps_grouped"] > 0
    exact = rounded_weights(reference)
    theirs, ours = divergences(exact, stock), divergences(exact, shared)
    worse = [mine - other for mine, other in zip(ours, theirs, strict=True)]
    error = statistics.stdev(worse) / math.sqrt(len(worse))
    print(f"from float32: stock {statistics.mean(theirs):.2e}, ours {statistics.mean(ours):.2e}")
    assert statistics.mean(theirs) > 0
    assert statistics.mean(worse) <= CONFIDENCE * error
    not_worth_it = grouping_or_reason["steps_skipped"].get(
        "not_worth_it", 0
    )  # the calibration on this machine may find no crossover
    assert grouping_or_reason["steps_grouped"] + not_worth_it > 0


def rounded_weights(model: Any) -> Any:
    with torch.inference_mode():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    return model


def distributions(engine: SharedEngine) -> list[Drawn]:
    """Tokens sampled with one seed per sample, and the distributions they were sampled from."""
    drawn = []
    for output in engine.live.generate(
        [prompt for prompt in PROMPTS for _ in range(GROUP_SIZE)],
        max_tokens=24,
        temperature=1.0,
        logprobs=VOCAB,
        ignore_eos=True,
        detokenize=False,
    ):
        [answer] = output.outputs
        rows = [[entry[token].logprob for token in range(VOCAB)] for entry in answer.logprobs]
        drawn.append((list(answer.token_ids), torch.tensor(rows, dtype=torch.float64)))
    return drawn


def divergences(exact: Any, drawn: list[Drawn]) -> list[float]:
    """Mean Kullback-Leibler divergence from the exact distributions, per prompt."""
    samples = [
        divergence(exact, PROMPTS[number // GROUP_SIZE], each) for number, each in enumerate(drawn)
    ]
    groups = zip(*[iter(samples)] * GROUP_SIZE, strict=True)
    return [statistics.mean(group) for group in groups]


def divergence(exact: Any, prompt: list[int], drawn: Drawn) -> float:
    tokens, logprobs = drawn
    with torch.inference_mode():
        logits = exact(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    true = logits.double().log_softmax(-1)
    return float((true.exp() * (true - logprobs)).sum(-1).mean())

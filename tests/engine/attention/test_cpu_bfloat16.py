"""In bfloat16 the distributions are stock's, as closely as rounding lets two kernels agree."""

from pathlib import Path

import pytest
import torch

from tests.engine.attention.groups import GROUP_SIZE, GROUPS, sample
from tests.engine.attention.shared_engine import SharedEngine, shared_engine
from tests.engine.models import VOCAB

# vLLM's imports and its draft methods warn of their own affairs.
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


def test_in_bfloat16_the_distributions_stay_close(sharp_model: Path, tmp_path: Path) -> None:
    with shared_engine(
        sharp_model, tmp_path, mode="auto", dtype="bfloat16", max_logprobs=VOCAB
    ) as engine:
        with engine.mode("off"):
            stock = distributions(engine)
        with engine.mode("always") as counted:
            shared = distributions(engine)
        with engine.mode("auto") as decided:
            sample(engine, 8)
    assert counted["steps_grouped"] > 0
    divergences = [
        float((theirs.exp() * (theirs - ours)).sum())
        for one, other in zip(stock, shared, strict=True)
        for theirs, ours in zip(*common(one, other), strict=True)
    ]
    assert len(divergences) > 1000
    assert 0 < sum(divergences) / len(divergences) < 1e-3
    not_worth_it = decided["steps_skipped"].get("not_worth_it", 0)  # this machine may find none
    assert decided["steps_grouped"] + not_worth_it > 0


# Prompts of other tokens: of a thousand draws the mean is known within 3 %.
OTHERS = 4

Drawn = tuple[list[int], torch.Tensor]


def distributions(engine: SharedEngine) -> list[Drawn]:
    """Tokens drawn with a seed for each sample, and what each was drawn from."""
    prompts = [
        [token + other for token in prompt]
        for other in range(OTHERS)
        for prompt in GROUPS
        for _ in range(GROUP_SIZE)
    ]
    drawn = []
    for output in engine.live.generate(
        prompts, max_tokens=24, temperature=1.0, logprobs=VOCAB, ignore_eos=True, detokenize=False
    ):
        [sample] = output.outputs
        rows = [[entry[token].logprob for token in range(VOCAB)] for entry in sample.logprobs]
        drawn.append((list(sample.token_ids), torch.tensor(rows, dtype=torch.float64)))
    return drawn


def common(one: Drawn, other: Drawn) -> tuple[torch.Tensor, torch.Tensor]:
    """Up to the first token that differs: it was still drawn after the same tokens."""
    pairs = enumerate(zip(one[0], other[0], strict=True))
    length = next((i + 1 for i, (mine, yours) in pairs if mine != yours), len(one[0]))
    return one[1][:length], other[1][:length]

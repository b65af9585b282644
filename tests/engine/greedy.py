"""Check that tokens are a model's greedy choice, by its own forward over all of them at once.

Two implementations round differently, and at a near tie either may choose either token, after which
the texts differ. So each token is judged given the tokens that precede it.
"""

from collections.abc import Sequence
from typing import Any

import torch

TIE = 1e-3


def assert_greedy(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> None:
    """Every token has the largest logit given those before it, or ties with it."""
    behind = logit_gap_to_greedy(model, prompt, tokens)
    worst = int(behind.argmax())
    assert behind[worst] <= TIE, f"token {worst} is {behind[worst]:.4f} behind the greedy choice"


def logit_gap_to_greedy(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Difference between the largest logit and that of each token."""
    assert tokens, "nothing to judge"
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    behind: torch.Tensor = logits.max(dim=1).values - chosen
    return behind

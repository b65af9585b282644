"""Training loss of a drafter: cross-entropy with sampled tokens or recorded top-k distributions.

Shape suffixes: T tokens of the row, V vocabulary, R positions with recorded top-k tokens, K of
them.

Without a recorded distribution, the target is the sampled token. With one, the target is the
probability of each top-k token in the served distribution, with one further outcome for all other
tokens. The expected value of the former loss over sampled tokens equals the latter, except within
the "other" outcome; the latter has no sampling noise.
"""

from typing import Final

import torch
from torch.nn.functional import log_softmax, nll_loss

from engine.drafter.trainer.packing import IGNORE_INDEX, PackedBatch

MIN_REMAINDER: Final = 1e-6
"""Minimum probability of the other tokens; smaller values are below the resolution of float32."""


def compute_loss(logits_TV: torch.Tensor, packed: PackedBatch) -> torch.Tensor:
    """Mean loss over the response tokens."""
    logs_TV = log_softmax(logits_TV, dim=-1)
    losses_T = nll_loss(logs_TV, packed.labels_T, ignore_index=IGNORE_INDEX, reduction="none")
    if packed.soft_targets is not None:
        positions_R, tokens_RK, probs_RK = packed.soft_targets
        losses_R = _soft_cross_entropy(logs_TV[positions_R[:, None], tokens_RK], probs_RK)
        losses_T = losses_T.index_copy(0, positions_R, losses_R)
    return losses_T.sum() / (packed.labels_T != IGNORE_INDEX).sum()


def _soft_cross_entropy(logs_RK: torch.Tensor, probs_RK: torch.Tensor) -> torch.Tensor:
    remainder_R = (1 - (logs_RK.exp() * (probs_RK > 0)).sum(-1)).clamp(min=MIN_REMAINDER)
    other_prob_R = (1 - probs_RK.sum(-1)).clamp(min=0)
    return -(probs_RK * logs_RK).sum(-1) - other_prob_R * remainder_R.log()

"""What a drafter is to say next, and how far it is from that.

Shape suffixes: T tokens of the row, V vocabulary, R places where the likeliest tokens were
recorded, K of them.

Where nothing was recorded it is to say the token that came: cross-entropy. Where the likeliest
were, it is to say each as often as the server would, and another token as often as it would:
cross-entropy too, with one outcome for all that was not recorded. Its mean over what may come is
the former's, up to what that outcome is made of; what falls away is chance.
"""

from typing import Final

import torch
from torch.nn.functional import log_softmax, nll_loss

from engine.drafter.trainer.packing import IGNORE_INDEX, PackedBatch

MIN_REMAINDER: Final = 1e-6
"""Of the mass that a drafter leaves to other tokens: below that, float32 cannot tell."""


def compute_loss(logits_TV: torch.Tensor, packed: PackedBatch) -> torch.Tensor:
    """The mean over the tokens of responses."""
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

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

from engine.drafter.trainer.packing import IGNORED, Packed

LEAST: Final = 1e-6
"""Of the mass that a drafter leaves to other tokens: below that, float32 cannot tell."""


def loss_of(logits_TV: torch.Tensor, packed: Packed) -> torch.Tensor:
    """The mean over the tokens of responses."""
    logs_TV = log_softmax(logits_TV, dim=-1)
    losses_T = nll_loss(logs_TV, packed.labels_T, ignore_index=IGNORED, reduction="none")
    if packed.soft is not None:
        places_R, tokens_RK, masses_RK = packed.soft
        losses_R = _soft(logs_TV[places_R[:, None], tokens_RK], masses_RK)
        losses_T = losses_T.index_copy(0, places_R, losses_R)
    return losses_T.sum() / (packed.labels_T != IGNORED).sum()


def _soft(logs_RK: torch.Tensor, masses_RK: torch.Tensor) -> torch.Tensor:
    left_R = (1 - (logs_RK.exp() * (masses_RK > 0)).sum(-1)).clamp(min=LEAST)
    other_R = (1 - masses_RK.sum(-1)).clamp(min=0)
    return -(masses_RK * logs_RK).sum(-1) - other_R * left_R.log()

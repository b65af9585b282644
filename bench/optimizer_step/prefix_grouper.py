"""Baseline that also computes a prompt only once: PrefixGrouper (PyPI, arXiv 2506.05433).

The whole group is one row. Its attention is split into that of the prompt and that of the responses
over a copy of the prompt's KV each. PrefixGrouper's own attention function uses the FlashAttention
package. This adapter passes it torch's attention in its fastest form: causal without a mask for the
prompt, and a boolean mask for the responses, which all have the same length here.
"""

from typing import Any

import torch
import torch.nn.functional as F
from prefix_grouper import PrefixGrouper
from prefix_grouper.forward import AttentionForward
from torch import Tensor, nn
from transformers import AttentionInterface

from coppice.train import RowLogprobs, TrainingGroup
from coppice.train.token_logprobs import token_logprobs

NAME = "prefix_grouper"


class GroupedInputs:
    """Tokens, positions and masks of a group in PrefixGrouper's format."""

    def __init__(self, group: TrainingGroup, device: torch.device) -> None:
        prompt, responses = group.prompt[None].to(device), torch.stack(group.responses).to(device)
        prompt_mask, mask = torch.ones_like(prompt), torch.ones_like(responses)
        self.group = group
        self.grouper = PrefixGrouper.from_ungrouped_masks(
            prompt_mask, mask, len(group.responses), device, padding_mode="right"
        )
        self.input_ids = self.grouper.concat_input(prompt, prompt_mask, responses, mask)
        P, R = prompt.shape[1], responses.shape[1]
        own = torch.arange(P, P + R, device=device).repeat(len(responses))
        self.position_ids = torch.cat([torch.arange(P, device=device), own])[None]
        self.visible_RS = torch.ones(R, P + R, dtype=torch.bool, device=device).tril(P)

    def logprobs(self, model: Any) -> RowLogprobs:
        """Logprobs of the response tokens; the output head is applied only to them."""
        hidden = model.model(
            input_ids=self.input_ids,
            position_ids=self.position_ids,
            use_cache=False,
            grouped=self,
        ).last_hidden_state
        _, _, hidden_GRM, _ = self.grouper.split_output(hidden, include_prefix_last=1)
        logits_TV = model.lm_head(hidden_GRM[:, :-1].flatten(0, 1))
        return RowLogprobs(
            logprobs=token_logprobs(logits_TV, torch.cat(self.group.responses), 1.0),
            rows=tuple(range(len(self.group.responses))),
            lengths=self.group.lengths,
        )


def _attention(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    *,
    grouped: GroupedInputs,
    scaling: float,
    **rest: Any,
) -> tuple[Tensor, None]:
    def attend(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        alone = q.shape[2] == k.shape[2]
        mask = None if alone else grouped.visible_RS
        o = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=alone, scale=scaling, enable_gqa=True
        )
        return o.transpose(1, 2)

    return AttentionForward(attend)(grouped.grouper, q, k, v), None


AttentionInterface.register(NAME, _attention)

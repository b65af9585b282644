"""Reference implementations, slow and simple, for tests of the optimized ones.

Shapes: G rows padded to R tokens each, T packed tokens of all rows, P prompt tokens, H query
heads, K KV heads, D head size, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from coppice.train.packed_row import Spans
from coppice.train.training_group import (
    LossFunction,
    RowLogprobs,
    TrainingGroup,
    TrainingTree,
    token_logprobs,
)


def naive_logprobs(model: Any, group: TrainingGroup, *, temperature: float = 1.0) -> RowLogprobs:
    """Differentiable logprobs from a padded batch in which every row repeats the prompt.

    Each segment of a tree becomes a row that repeats the whole path to it.
    """
    if isinstance(group, TrainingTree):
        return _naive_segments(model, group, temperature)
    rows = [torch.cat([group.prompt, response])[:-1] for response in group.responses]
    # Right padding: under a causal mask no token reads it, so no attention mask is needed.
    padded_GR = pad_sequence(rows, batch_first=True).to(model.device)
    logits_GRV = model(input_ids=padded_GR, use_cache=False).logits
    first = len(group.prompt) - 1
    logits_TV = torch.cat(
        [logits_GRV[row, first : first + length] for row, length in enumerate(group.lengths)]
    )
    return RowLogprobs(
        logprobs=token_logprobs(logits_TV, torch.cat(group.responses), temperature),
        rows=tuple(range(len(group.responses))),
        lengths=group.lengths,
    )


def _naive_segments(model: Any, tree: TrainingTree, temperature: float) -> RowLogprobs:
    paths = [tree.path(segment) for segment in range(len(tree.responses))]
    alone = [torch.cat([tree.responses[at] for at in path]) for path in paths]
    flat = TrainingGroup(prompt=tree.prompt, responses=tuple(alone))
    rows = naive_logprobs(model, flat, temperature=temperature).split()
    parts = [row[len(row) - length :] for row, length in zip(rows, tree.lengths, strict=True)]
    segments = tuple(range(len(tree.responses)))
    return RowLogprobs(logprobs=torch.cat(parts), rows=segments, lengths=tree.lengths)


def naive_backward(
    model: Any, group: TrainingGroup, loss_fn: LossFunction, *, temperature: float = 1.0
) -> float:
    """Reference for grouped_backward: accumulates the gradient and returns the loss."""
    loss = loss_fn(naive_logprobs(model, group, temperature=temperature))
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()


def reference_attention(
    q_1HTD: Tensor,
    prompt: tuple[Tensor, Tensor],
    k_1KTD: Tensor,
    v_1KTD: Tensor,
    spans: Spans,
    scale: float,
) -> Tensor:
    """Reference for shared_prompt_attention: o_1HTD by masked attention, row by row.

    Each row reads the concatenation of the prompt, its ancestors in the tree, and itself.
    """
    outputs = [q_1HTD[:, :, :0]]
    start = 0
    for length in spans.lengths:
        own = slice(start, start + length)
        above = [slice(b.start, b.stop) for b in spans.branches if b.stop <= start < b.end]
        before_k = torch.cat([prompt[0], *(k_1KTD[:, :, part] for part in above)], 2)
        before_v = torch.cat([prompt[1], *(v_1KTD[:, :, part] for part in above)], 2)
        q, k, v = (packed[:, :, own] for packed in (q_1HTD, k_1KTD, v_1KTD))
        outputs.append(_row_attention(q, (before_k, before_v), k, v, scale))
        start += length
    return torch.cat(outputs, 2)


def _row_attention(
    q_1HRD: Tensor, prompt: tuple[Tensor, Tensor], k_1KRD: Tensor, v_1KRD: Tensor, scale: float
) -> Tensor:
    prompt_k, prompt_v = prompt
    R, P = q_1HRD.shape[2], prompt_k.shape[2]
    visible_RS = torch.ones(R, P + R, dtype=torch.bool, device=q_1HRD.device).tril(P)
    return F.scaled_dot_product_attention(
        q_1HRD,
        torch.cat([prompt_k, k_1KRD], 2),
        torch.cat([prompt_v, v_1KRD], 2),
        attn_mask=visible_RS,
        scale=scale,
        enable_gqa=True,
    )

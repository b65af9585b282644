"""Reference implementations, slow and simple, for tests of the optimized ones.

Shapes: G rows padded to R tokens each, T packed tokens of all rows, P prompt tokens, H query
heads, K KV heads, D head size, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from coppice.train.layer_attention import LayerAttention, window_mask
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
    layer: LayerAttention,
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
        outputs.append(
            _row_attention(q, torch.cat([before_k, k], 2), torch.cat([before_v, v], 2), layer)
        )
        start += length
    return torch.cat(outputs, 2)


def _row_attention(q_1HRD: Tensor, k_1KSD: Tensor, v_1KSD: Tensor, layer: LayerAttention) -> Tensor:
    H, R, S = q_1HRD.shape[1], q_1HRD.shape[2], k_1KSD.shape[2]
    keys, values = (x.repeat_interleave(H // x.shape[1], 1) for x in (k_1KSD, v_1KSD))
    visible_RS = window_mask(R, S, layer.window).to(q_1HRD.device)
    scores_1HRS = (layer.scale * q_1HRD @ keys.mT).masked_fill(~visible_RS, -torch.inf)
    if layer.sinks_H is None:
        return scores_1HRS.softmax(-1) @ values
    sinks_1HR1 = layer.sinks_H.view(1, H, 1, 1).expand(1, H, R, 1)
    weights_1HRS = torch.cat([scores_1HRS, sinks_1HR1], -1).softmax(-1)[..., :S]
    return weights_1HRS @ values

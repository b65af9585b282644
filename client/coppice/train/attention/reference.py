"""Reference implementation of attention over a shared prompt, for devices without a fast kernel.

Shapes: T packed tokens of all rows, R tokens of a row, S tokens that it reads, H query heads, K KV
heads, D head size.
"""

import torch
from torch import Tensor

from coppice.train.attention.windows_and_sinks import LayerAttention, window_mask
from coppice.train.packed_row import Spans


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

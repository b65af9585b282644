"""FlexAttention on CUDA computes the same as attention.py on CPU.

Its kernel and its backward are not run here: on CPU it has an unfused forward only. Layouts and
masks are the same on both, and the mask is the only difference from plain causal attention.

Shapes: T packed tokens, P prompt tokens, D head size.
"""

import warnings
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from coppice.train.attention.flex import FlexAttention, Layout, packed_layout, response_layout
from coppice.train.attention.forward_contexts import PackedContext
from coppice.train.attention.shared_prompt import shared_prompt_attention
from coppice.train.attention.windows_and_sinks import LayerAttention
from coppice.train.packed_row import Branch, Spans

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
PLAIN = LayerAttention(scale=0.3)
SINKS = torch.tensor([-2.0, 0.0, 1.0, 4.0])
LAYERS = [
    PLAIN,
    LayerAttention(scale=0.3, window=5),
    LayerAttention(scale=0.3, window=90, sinks_H=SINKS),
    LayerAttention(scale=0.3, sinks_H=SINKS),
]
each_layer = pytest.mark.parametrize("layer", LAYERS, ids=["plain", "window", "both", "sinks"])
TREE = Spans(
    lengths=(4, 3, 70, 2, 0, 2, 5),
    branches=(Branch(start=0, stop=4, end=81), Branch(start=7, stop=77, end=81)),
)
GROUPS = [
    (3, Spans(lengths=(2, 0, 4))),
    (1, TREE),
    (0, Spans(lengths=(5, 5))),
    (130, Spans(lengths=(64, 200))),
]


def random(tokens: int, heads: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, heads, tokens, 16, generator=generator)


def flexed(
    layout: Layout, q: Tensor, k: Tensor, v: Tensor, layer: LayerAttention = PLAIN
) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        return FlexAttention(layout)(q, k, v, layer)


@each_layer
@pytest.mark.parametrize("prompt_tokens", [0, 1, 61, 300])
@pytest.mark.parametrize(
    "spans", [*(Spans(lengths=of) for of in [(1,), (0, 2, 0, 2), (130, 130)]), TREE], ids=str
)
def test_responses_attend_to_the_prompt_and_themselves(
    prompt_tokens: int, spans: Spans, layer: LayerAttention
) -> None:
    T = spans.num_tokens
    q, k, v = random(T, 4, 0), random(T, 2, 1), random(T, 2, 2)
    prompt_k, prompt_v = random(prompt_tokens, 2, 3), random(prompt_tokens, 2, 4)
    layout = response_layout(prompt_tokens, spans, CPU)
    found = flexed(layout, q, torch.cat([prompt_k, k], 2), torch.cat([prompt_v, v], 2), layer)
    expected = shared_prompt_attention(q, (prompt_k, prompt_v), k, v, spans, layer)
    torch.testing.assert_close(found, expected)


@each_layer
@pytest.mark.parametrize("groups", [GROUPS[:1], GROUPS[:2], GROUPS, GROUPS[::-1]], ids=str)
def test_packed_groups_attend_to_their_own_prompt(
    groups: Sequence[tuple[int, Spans]], layer: LayerAttention
) -> None:
    T = sum(prompt + spans.num_tokens for prompt, spans in groups)
    q, k, v = random(T, 4, 0), random(T, 2, 1), random(T, 2, 2)
    found = flexed(packed_layout(groups, CPU), q, k, v, layer)
    expected = PackedContext(1, T, groups).attend(0, q, k, v, layer)
    torch.testing.assert_close(found, expected)


def test_mask_of_a_small_group_equals_the_written_one() -> None:
    mask = create_mask(
        packed_layout([(2, Spans(lengths=(1, 2)))], CPU).visible(None),
        None,
        None,
        5,
        5,
        device="cpu",
    )
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]


def test_mask_of_a_window_counts_positions_and_not_places_in_the_row() -> None:
    """The second response follows the prompt, although the first lies between them."""
    layout = packed_layout([(2, Spans(lengths=(2, 2)))], CPU)
    mask = create_mask(layout.visible(2), None, None, 6, 6, device="cpu")
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 1, 0, 0, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]

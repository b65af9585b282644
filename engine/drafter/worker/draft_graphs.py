"""CUDA graph manager of the draft model's forward passes (vLLM's Model Runner V2).

There are two kinds of graphs, captured and dispatched by vLLM's graph manager for draft models:

- The first pass of a step: all rows with the same number of tokens, which are the tokens that the
  step verified and the token that it sampled.
- A later pass: one token per row. The graph also advances its own inputs, so one graph per number
  of rows serves drafts of every length: it is replayed once per pass.

With a CUDA graph plan there is a graph for each planned number of samples, and no other. Without
one, the sizes are vLLM's capture sizes.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import (
    SpeculatorCudaGraphManager,
)

from engine.cudagraphs.graph_candidates import candidates_by_num_tokens
from engine.cudagraphs.planner import Plan
from engine.cudagraphs.shapes import GraphShape, decode

CORRECTION_TOKENS: Final = 1
"""Tokens per row of the first pass besides those that the step verified: the sampled token."""


def first_pass_shapes(plan: Plan, max_tokens: int) -> list[GraphShape]:
    """Shapes of first passes of up to `max_tokens` tokens, with the planned numbers of samples.

    A step that verifies no drafts has a first pass if the next one does. So its shapes are needed
    up to the largest number of samples with drafts.
    """
    drafting = [shape for shape in plan.shapes if (shape.query_len or 1) > 1]
    most = max((shape.samples for shape in drafting), default=0)
    waiting = [shape for shape in plan.shapes if shape.query_len == 1 and shape.samples <= most]
    shapes = (
        decode(shape.samples, (shape.query_len or 1) + CORRECTION_TOKENS)
        for shape in (*drafting, *waiting)
    )
    return [shape for shape in shapes if shape.tokens <= max_tokens]


def later_pass_shapes(plan: Plan) -> list[GraphShape]:
    """Shapes of later passes: one token for each sample, for all numbers of samples with drafts."""
    numbers = {shape.samples for shape in plan.shapes if (shape.query_len or 1) > 1}
    return [decode(samples, 1) for samples in sorted(numbers)]


class DraftGraphManager(SpeculatorCudaGraphManager):  # type: ignore[misc]
    """vLLM's graph manager for draft models, restricted to the given shapes.

    `shapes` None: vLLM's capture sizes.
    """

    def __init__(
        self,
        vllm_config: Any,
        device: torch.device,
        cudagraph_mode: CUDAGraphMode,
        query_len: int,
        shapes: Sequence[GraphShape] | None,
    ) -> None:
        self._shapes = shapes
        super().__init__(vllm_config, device, cudagraph_mode, query_len)

    def _init_candidates(self) -> None:
        if self._shapes is None:
            super()._init_candidates()
        elif self.cudagraph_mode and self._shapes:
            descs = sorted(map(_descriptor, self._shapes), key=lambda d: -d.num_tokens)
            self._capture_descs = {CUDAGraphMode.FULL: descs}
            self._candidates = candidates_by_num_tokens(descs)


def _descriptor(shape: GraphShape) -> BatchExecutionDescriptor:
    return BatchExecutionDescriptor(
        cg_mode=CUDAGraphMode.FULL,
        num_tokens=shape.tokens,
        num_reqs=shape.samples,
        uniform_token_count=shape.query_len,
    )


def graph_mode(mode: CUDAGraphMode, support: AttentionCGSupport, needed: AttentionCGSupport) -> Any:
    """Graph mode of draft passes whose attention needs some support for CUDA graphs."""
    is_full = mode.decode_mode() == CUDAGraphMode.FULL and support.value >= needed.value
    return CUDAGraphMode.FULL_DECODE_ONLY if is_full else CUDAGraphMode.NONE

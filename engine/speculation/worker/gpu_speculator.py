"""Speculator class of Model Runner V2: uses drafts looked up by EngineCore.

vLLM has no speculator for drafts from outside. Its GPU n-gram method comes closest: it keeps Model
Runner V2, asynchronous scheduling and full CUDA graphs, and needs no draft model. So the engine is
configured with that method, and `speculator_factory` creates this class instead.

The drafts of a step arrive with the scheduler's output. Before the step's inputs are prepared, they
are copied to the device from pinned memory, and realigned there after the sampled tokens of the
step before. The host waits for nothing.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from engine.speculation.draft_message import ATTRIBUTE, LateDrafts, lookup_length


class SiblingSpeculator(BaseSpeculator):  # type: ignore[misc]
    """Writes late drafts to the draft tokens of vLLM's request states.

    Nothing here is guarded: tensor-parallel ranks must verify the same drafts, so a rank must not
    go on without them.
    """

    supports_mm_inputs = False
    draft_logits = None
    """A draft has one token per position, which vLLM's rejection sampler verifies as certain."""

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        self.req_states = req_states
        self.device = device
        max_draft_tokens = vllm_config.speculative_config.num_speculative_tokens
        self._width = lookup_length(max_draft_tokens)
        self._no_drafts = torch.zeros(
            (vllm_config.scheduler_config.max_num_seqs, max_draft_tokens),
            dtype=torch.int64,
            device=device,
        )
        load_drafts_before_inputs()

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Do nothing: there is no draft model."""

    def capture(self) -> None:
        """Do nothing: there is no draft model."""

    def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """No drafts: those of the next step are not known yet."""
        return self._no_drafts[: input_batch.num_reqs]

    def load(self, scheduler_output: Any) -> None:
        """Write the drafts of a step that is about to run.

        Every scheduled draft position gets a token id of the vocabulary. Positions without a draft
        get token 0, which is verified like any other.
        """
        request_ids = list(scheduler_output.scheduled_spec_decode_tokens)
        if not request_ids:
            return
        indices = [self.req_states.req_id_to_index[request_id] for request_id in request_ids]
        late = getattr(scheduler_output, ATTRIBUTE, None) or self._nothing()
        table = async_tensor_h2d(late.table(request_ids, indices), device=self.device)
        drafts = self.req_states.draft_tokens
        aligned = realign(table, self.req_states.all_token_ids.gpu, self.req_states.total_len.gpu)
        drafts[table[:, 0]] = aligned[:, : drafts.shape[1]].to(drafts.dtype)

    def _nothing(self) -> LateDrafts:
        none = np.zeros(0, np.int32)
        tokens = np.zeros((0, self._width), np.int32)
        return LateDrafts(rows={}, num_tokens=none, lengths=none, tokens=tokens)


def realign(
    table: torch.Tensor, all_token_ids: torch.Tensor, total_len: torch.Tensor
) -> torch.Tensor:
    """Drafts that continue the tokens on the device, [rows, width], zero where there are none.

    `table` is that of LateDrafts. `all_token_ids` [requests, positions] and `total_len` [requests]
    are vLLM's request states, which include the tokens sampled since the lookup.
    """
    requests, (starts, lengths) = table[:, 0], table[:, 1:3, None].unbind(1)
    drafts = table[:, 3:]
    columns = torch.arange(drafts.shape[1], dtype=torch.int32, device=table.device)
    num_new = total_len[requests, None] - starts
    positions = (starts + columns).clamp_(max=all_token_ids.shape[1] - 1)
    new_tokens = all_token_ids[requests[:, None], positions]
    differs = ((new_tokens != drafts) & (columns < num_new)).any(1, keepdim=True)
    sources = columns + num_new
    is_draft = ~differs & (num_new >= 0) & (sources < lengths)
    shifted = drafts.gather(1, sources.clamp(0, drafts.shape[1] - 1).long())
    return torch.where(is_draft, shifted, 0)


@functools.cache
def load_drafts_before_inputs() -> None:
    """Patch Model Runner V2, so that drafts are loaded before a step's inputs are prepared."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    GPUModelRunner.prepare_inputs = _with_drafts(GPUModelRunner.prepare_inputs)


def _with_drafts(prepare_inputs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(prepare_inputs)
    def prepare(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.speculator, SiblingSpeculator):
            self.speculator.load(scheduler_output)
        return prepare_inputs(self, scheduler_output, *args, **kwargs)

    return prepare

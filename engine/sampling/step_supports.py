"""Allowed token ids (supports) of one step's tokens, packed for transport to the service.

They use vLLM's own transport of sampling masks: `ModelRunnerOutput.sampling_masks`, then
`EngineCoreOutput.new_sampling_mask`. Instead of token ids it carries a row of bytes per token: the
requested logprobs (`requested_logprobs`) and the encoded support, as far as the request
returns them. So a support takes a few bytes, and other requests cost nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import SamplingMaskLists

from engine.runtime.feature_guard import feature
from engine.sampling.requested_logprobs import (
    GIVEN_ARG,
    RAW_ARG,
    RequestedLogprobs,
    requested_logprobs,
)
from engine.sampling.support_encoding import encode_mask, split_rows

SUPPORT_ARG = "coppice_support"
FEATURE = feature("support replay")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Values that a request returns with each token, beside its logprobs of vLLM."""

    support: bool = False
    logprobs: RequestedLogprobs = RequestedLogprobs()

    def __bool__(self) -> bool:
        return self.support or self.logprobs.width > 0

    @staticmethod
    def by(sampling_params: Any) -> "Wanted":
        args = (sampling_params and sampling_params.extra_args) or {}
        if _ARGS.isdisjoint(args):
            return NOTHING
        return Wanted(bool(args.get(SUPPORT_ARG)), requested_logprobs(args))


NOTHING = Wanted()
_ARGS = {SUPPORT_ARG, GIVEN_ARG, RAW_ARG}


@dataclass(frozen=True, slots=True)
class StepSupport:
    """Encoded supports of one step, by batch row; in the place of vLLM's `SamplingMaskLists`."""

    rows: Mapping[int, list[bytes]]

    def slice_request(self, row: int, num_positions: int) -> list[bytes] | None:
        """The supports of the first sampled tokens of a batch row; None if it has none.

        vLLM's scheduler calls it for each request with the number of tokens that it keeps.
        `engine.held_outputs.core` joins them before they are sent.
        """
        supports = self.rows.get(row)
        return None if supports is None else supports[:num_positions]


def joined_rows(rows: Sequence[bytes]) -> SamplingMaskLists:
    """Encoded supports of consecutive tokens of a request, as they are sent."""
    return SamplingMaskLists(
        np.frombuffer(b"".join(rows), np.uint8),
        np.cumsum([0, *map(len, rows)], dtype=np.int64),
    )


def rows_of(chunks: Sequence[SamplingMaskLists]) -> list[bytes]:
    """The encoded supports of a request, from the slices that vLLM collected in its steps."""
    return [row for chunk in chunks for row in _rows_of_chunk(chunk)]


def _rows_of_chunk(chunk: SamplingMaskLists) -> list[bytes]:
    # vLLM slices without offsets if it cuts to one token.
    offsets = [0, len(chunk.token_ids)] if chunk.offsets is None else chunk.offsets.tolist()
    return split_rows(chunk.token_ids, offsets)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRow:
    """Values of a batch row at its sampled positions n, before its tokens are on the host.

    `kept_nv` is true for the token ids that remained after all logits processing.
    """

    kept_nv: torch.Tensor | None
    values_nw: torch.Tensor | None

    def encode(self, num_tokens: int) -> list[bytes]:
        rows = [b""] * num_tokens
        if self.values_nw is not None:
            rows = [values.tobytes() for values in self.values_nw.numpy()[:num_tokens]]
        if self.kept_nv is not None:
            masks = self.kept_nv.numpy()[:num_tokens]
            rows = [row + encode_mask(mask) for row, mask in zip(rows, masks, strict=True)]
        return rows


@dataclass(frozen=True, slots=True)
class PendingSupport:
    """Supports of a step of vLLM's first model runner, by batch row."""

    rows: Mapping[int, PendingRow]

    def encode(self, sampled: Sequence[Sequence[int]]) -> StepSupport:
        """Encode the supports of the tokens that each batch row sampled."""
        return StepSupport({row: held.encode(len(sampled[row])) for row, held in self.rows.items()})


def returns_output() -> bool:
    """True on the rank whose output is used."""
    from vllm.distributed import parallel_state

    return (
        not parallel_state.model_parallel_is_initialized()
        or parallel_state.get_tensor_model_parallel_rank() == 0
    )

"""Supports of the tokens that one step sampled, on their way from the sampler to the service.

They use vLLM's own transport of sampling masks: `ModelRunnerOutput.sampling_masks`, then
`EngineCoreOutput.new_sampling_mask`. Instead of token ids it carries encoded supports. So a support
takes a few bytes, and requests without supports cost nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.outputs import SamplingMaskLists

from engine.sampling_support.rows import Mask, encode_mask, split_rows

SUPPORT_ARG = "coppice_support"


def wants_support(sampling_params: Any) -> bool:
    """True if a request returns the supports of its tokens."""
    return bool(sampling_params and (sampling_params.extra_args or {}).get(SUPPORT_ARG))


@dataclass(frozen=True, slots=True)
class StepSupport:
    """Encoded supports of one step, by batch row; in the place of vLLM's `SamplingMaskLists`."""

    rows: Mapping[int, list[bytes]]

    def slice_request(self, row: int, num_positions: int) -> SamplingMaskLists | None:
        """The supports of the first sampled tokens of a batch row; None if it has none.

        vLLM's scheduler calls it for each request with the number of tokens that it keeps.
        """
        supports = self.rows.get(row)
        if supports is None:
            return None
        kept = supports[:num_positions]
        return SamplingMaskLists(
            np.frombuffer(b"".join(kept), np.uint8),
            np.cumsum([0, *map(len, kept)], dtype=np.int64),
        )


def rows_of(chunks: Sequence[SamplingMaskLists]) -> list[bytes]:
    """The encoded supports of a request, from the slices that vLLM collected in its steps."""
    return [row for chunk in chunks for row in _rows_of_chunk(chunk)]


def _rows_of_chunk(chunk: SamplingMaskLists) -> list[bytes]:
    # vLLM slices without offsets if it cuts to one token.
    offsets = [0, len(chunk.token_ids)] if chunk.offsets is None else chunk.offsets.tolist()
    return split_rows(chunk.token_ids, offsets)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingSupport:
    """Supports of a step of vLLM's first model runner, before its sampled tokens are on the host.

    `kept_nv` is true for the token ids that remained after all logits processing, for each sampled
    position n of the batch rows in `starts`. The positions of a row begin at its start.
    """

    kept_nv: torch.Tensor
    starts: Mapping[int, int]

    def encode(self, sampled: Sequence[Sequence[int]]) -> StepSupport:
        """Encode the supports of the tokens that each batch row sampled."""
        masks = self.kept_nv.numpy()
        return StepSupport(
            {
                row: [encode_mask(mask) for mask in masks[start : start + len(sampled[row])]]
                for row, start in self.starts.items()
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SupportTensors:
    """Supports of a step of vLLM's second model runner, in the place of `SamplingMaskTensors`.

    vLLM's kernel writes for every row a bitmap and the first token ids of the set. Only `wanted`
    batch rows are encoded.
    """

    tensors: Any
    wanted: NDArray[np.bool_]

    def to_cpu_nonblocking(self) -> "SupportTensors":
        return replace(self, tensors=self.tensors.to_cpu_nonblocking())

    def tolists(self, num_sampled_tokens: NDArray[Any]) -> StepSupport:
        """Encode the supports; called in the thread that waits for the step's results."""
        bitmaps = self.tensors.packed_mask.cpu().numpy()
        slots, vocab_size = self.tensors.rows_per_request, self.tensors.vocab_size

        def mask(index: int) -> Mask:
            bits = np.unpackbits(bitmaps[index], count=vocab_size, bitorder="little")
            return bits.view(np.bool_)

        return StepSupport(
            {
                row: [encode_mask(mask(row * slots + n)) for n in range(num_sampled_tokens[row])]
                for row in np.flatnonzero(self.wanted).tolist()
            }
        )

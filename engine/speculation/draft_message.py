"""Message from EngineCore to workers: drafts computed from the tokens before the current step.

A draft continues a request's tokens as they were before the step in progress. Meanwhile the step
samples more tokens. The worker compares them with the draft (`gpu_speculator.realign`): it cuts off
the part that was generated in the meantime, or drops the draft if it differs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.draft_index.store_protocol import DraftBatch, Int32Array

ATTRIBUTE = "coppice_late_drafts"
"""Attribute of vLLM's SchedulerOutput that contains a step's LateDrafts, if it has any."""


def lookup_length(max_draft_tokens: int) -> int:
    """Number of tokens to look up: the longest draft, after all tokens of a step in progress."""
    return 2 * max_draft_tokens + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LateDrafts:
    """Drafts of a step by request.

    `lengths` are the request's number of tokens at the lookup, and the draft's. `tokens` are
    padded with zeros.
    """

    rows: dict[str, int]
    num_tokens: Int32Array
    """[rows]"""
    lengths: Int32Array
    """[rows]"""
    tokens: Int32Array
    """[rows, lookup_length]"""

    def table(self, request_ids: Sequence[str], req_indices: Sequence[int]) -> Int32Array:
        """One row per request: its index in the runner, number of tokens, draft length and draft.

        A request without a draft gets an empty one.
        """
        table = np.zeros((len(request_ids), 3 + self.tokens.shape[1]), np.int32)
        table[:, 0] = req_indices
        rows = np.array([self.rows.get(request_id, -1) for request_id in request_ids])
        is_drafted = rows >= 0
        drafted = rows[is_drafted]
        table[is_drafted, 1], table[is_drafted, 2] = self.num_tokens[drafted], self.lengths[drafted]
        table[is_drafted, 3:] = self.tokens[drafted]
        return table


def after_step(drafted: DraftBatch, num_new: NDArray[np.int64], width: int) -> DraftBatch:
    """Rest of drafts after a step that generates their first `num_new` tokens.

    [rows, width]. The first remaining token's probability includes that of the tokens before it.
    """
    probability = np.where(
        np.arange(drafted.probability.shape[1]) < drafted.lengths[:, None], drafted.probability, 0
    )
    joint = np.cumprod(probability, axis=1, dtype=np.float32)
    columns = num_new[:, None] + np.arange(width)
    columns = np.minimum(columns, drafted.tokens.shape[1] - 1)
    arrays: dict[str, Any] = {
        each.name: np.take_along_axis(getattr(drafted, each.name), columns, axis=1)
        for each in fields(drafted)
        if each.name != "lengths"
    }
    arrays["probability"][:, 0] = np.take_along_axis(joint, columns[:, :1], axis=1)[:, 0]
    lengths = np.clip(drafted.lengths - num_new, 0, width).astype(np.int32)
    return DraftBatch(lengths=lengths, **arrays)

"""Grouping of a step's rows by shared prefix, or the reason for stock attention, for all backends.

Decode rows come first in a step, so the rows that can be grouped are a leading run; the prefill
rows after them use stock attention.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from engine.attention.counters import Counters
from engine.attention.crossover import Crossover, StepWork
from engine.attention.planner import Planner
from engine.settings import SharedPrefixMode
from engine.stats import AttentionFallbackReason
from kernels.shared_prefix_attention.plan import Int32s, SharingPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGrouping:
    """Sharing plan for the first `num_rows` rows, and `num_tokens` tokens, of a step."""

    plan: SharingPlan
    num_rows: int
    num_tokens: int


class StepGrouper:
    """Groups a step's rows by shared prefix; one instance per set of layers with one block table.

    `mode` may change between two steps.
    """

    def __init__(
        self,
        *,
        mode: SharedPrefixMode,
        block_size: int,
        bytes_per_token: int,
        max_query_tokens: int,
        counts: Counters,
        unsupported: AttentionFallbackReason | None = None,
        crossover: Crossover | None = None,
    ) -> None:
        """`bytes_per_token` is the KV size of all layers of the group on this rank."""
        self.mode = mode
        self._planner = Planner(block_size)
        self._bytes_per_token = bytes_per_token
        self._max_query_tokens = max_query_tokens
        self._counts = counts
        self._unsupported = unsupported
        self._crossover = crossover

    def group_rows(
        self, table: Int32s, seq_lens: Int32s, query_starts: Int32s
    ) -> StepGrouping | None:
        """Group the rows of a step; None if the whole step uses stock attention.

        The arrays are [rows, columns], [rows] and [rows + 1], on the host.
        """
        if self.mode == "off":
            return None
        grouping_or_reason = self._unsupported or self._decide(table, seq_lens, query_starts)
        if isinstance(grouping_or_reason, StepGrouping):
            self._counts.record_grouped(
                num_rows=num_grouped_rows(grouping_or_reason.plan),
                bytes_saved=self._bytes_per_token * num_tokens_saved(grouping_or_reason.plan),
            )
            return grouping_or_reason
        self._counts.skipped(grouping_or_reason)
        return None

    def _decide(
        self, table: Int32s, seq_lens: Int32s, query_starts: Int32s
    ) -> StepGrouping | AttentionFallbackReason:
        query_lens = np.diff(query_starts)
        num_rows = count_leading(query_lens <= self._max_query_tokens)
        if num_rows == 0:
            return "query_length"
        lens = seq_lens[:num_rows]
        plan = self._planner.plan(table[:num_rows], lens - query_lens[:num_rows])
        if len(plan.node_tokens) == 0:
            return "nothing_shared"
        num_tokens = int(query_starts[num_rows])
        if self.mode == "auto" and self._crossover is not None:
            work = StepWork.of(plan, lens, num_tokens)
            if not self._crossover.is_faster(work):
                return "not_worth_it"
        return StepGrouping(plan=plan, num_rows=num_rows, num_tokens=num_tokens)


def count_leading(wanted: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    """Number of leading True values."""
    return len(wanted) if wanted.all() else int(wanted.argmin())


# Cached because a plan serves many steps.
@lru_cache(maxsize=4)
def num_grouped_rows(plan: SharingPlan) -> int:
    return int(np.count_nonzero(plan.suffix_starts))


@lru_cache(maxsize=4)
def num_tokens_saved(plan: SharingPlan) -> int:
    """Tokens not read: each node's tokens are read for one of its rows only."""
    return int(((np.diff(plan.node_row_offsets) - 1) * plan.node_tokens).sum())

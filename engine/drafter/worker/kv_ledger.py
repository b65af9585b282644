"""Tracking of KV cache blocks with missing draft-model KV after steps without drafts.

In a step without drafts the draft model does not run, so the blocks that the step fills lack the
draft model's KV. The first step that drafts again computes what is missing. The record is per block
and not per request, because requests share blocks through the prefix cache.

Everything here is on the host. Under asynchronous scheduling the host knows only an upper bound of
a row's length, as long as the outcome of its last drafts is on the GPU. All estimates therefore err
towards computing a token again, which writes the same values to the same slots.
"""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
UNPROCESSED_STEPS = 2
"""Steps whose drafts may be counted in a row's length although their outcome is not known yet."""


class DraftKvLedger:
    """Record of the blocks that are complete: the draft model has computed all their tokens.

    Rows are indices of vLLM's request states. A row is current if the draft model has computed all
    its tokens before this step.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, table_shape: tuple[int, int], max_drafts: int
    ) -> None:
        self._block_size = block_size
        self._unknown_tokens = UNPROCESSED_STEPS * max_drafts
        self._is_complete = np.zeros(num_blocks, np.bool_)
        self._table = np.zeros(table_shape, np.int64)
        self._num_blocks = np.zeros(table_shape[0], np.int64)
        self._num_complete = np.zeros(table_shape[0], np.int64)
        self._is_new = np.zeros(table_shape[0], np.bool_)
        self._is_current = np.zeros(table_shape[0], np.bool_)

    def append_blocks(self, row: int, blocks: list[int], *, overwrite: bool) -> None:
        """Record blocks that vLLM adds to a row's block table, or a new row's whole table."""
        if overwrite:
            self._num_blocks[row] = self._num_complete[row] = 0
            self._is_new[row], self._is_current[row] = True, False
        else:
            self._is_complete[blocks] = False
        start = self._num_blocks[row]
        self._num_blocks[row] = start + len(blocks)
        self._table[row, start : start + len(blocks)] = blocks

    def skip(self, rows: Ints, starts: Ints) -> None:
        """Record a step in which the draft model does not run; rows begin at these positions."""
        self._register_new(rows, starts)
        self._is_current[rows] = False

    def missing(self, rows: Ints, starts: Ints, num_tokens: Ints, is_exact: Ints) -> Ints:
        """Number of tokens before each row's start that the draft model must compute first.

        The draft model then also computes the step's `num_tokens` per row, so that all rows are
        current afterwards. Rows that share blocks compute them once. `is_exact`: the row has no
        drafts whose outcome is unknown.
        """
        self._register_new(rows, starts)
        counts = np.zeros(len(rows), np.int64)
        ends = starts + num_tokens - np.where(is_exact, 0, self._unknown_tokens)
        full = np.minimum(ends // self._block_size, self._num_blocks[rows])
        stale = ~self._is_current[rows]
        for i in np.flatnonzero(stale | (full > self._num_complete[rows])):
            row = rows[i]
            if stale[i]:
                self._num_complete[row] = self._leading_complete(row, int(starts[i]))
                counts[i] = starts[i] - self._num_complete[row] * self._block_size
            if full[i] > self._num_complete[row]:
                self._is_complete[self._table[row, : full[i]]] = True
                self._num_complete[row] = full[i]
        self._is_current[rows] = True
        return counts

    def _register_new(self, rows: Ints, starts: Ints) -> None:
        """Mark the blocks that new rows will fill as incomplete; the others are cached prefixes."""
        for i in np.flatnonzero(self._is_new[rows]):
            row, first = rows[i], int(starts[i]) // self._block_size
            self._is_complete[self._table[row, first : self._num_blocks[row]]] = False
            self._is_new[row] = False

    def _leading_complete(self, row: int, start: int) -> int:
        """Number of complete blocks at the beginning of a row, before the position `start`."""
        complete = self._is_complete[self._table[row, : start // self._block_size]]
        return len(complete) if complete.all() else int(complete.argmin())

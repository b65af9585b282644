"""Which rows of a step share which pieces of cache: what every kernel here works from.

A node is a run of physical cache blocks that several rows read; nodes of one row follow each other
from position 0 (a system prompt, then a prompt, then a branch), and what comes after a row's last
node is its own suffix, read through its block table. A row in no node is all suffix.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharingPlan:
    """Ragged lists as flat values with offsets: node i owns values[offsets[i]:offsets[i + 1]].

    Suffix lengths are not here: kernels read them from the sequence lengths of the step, so a plan
    holds as long as no row joins, leaves, moves or enters a deeper shared block.
    """

    node_blocks: Int32s
    node_block_offsets: Int32s
    node_tokens: Int32s
    """Tokens that the node's rows share in its blocks; the last block may be shared in part."""
    node_rows: Int32s
    node_row_offsets: Int32s
    suffix_starts: Int32s
    """Per row: the sum of its nodes' tokens, where its suffix begins."""

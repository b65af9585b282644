"""Input of the shared-prefix attention kernels: KV blocks shared by batch rows in a step.

A node is a range of physical cache blocks that several rows read. The nodes of a row are
consecutive from position 0, for example a system prompt, a prompt and a branch. The positions after
its last node are the row's suffix, which is read through its block table. A row without nodes
consists of its suffix only.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharingPlan:
    """Tree of the prefixes that a step's rows share; each node has cache blocks and rows.

    Ragged lists are flat values with offsets: node i has values[offsets[i]:offsets[i + 1]].

    Suffix lengths are not included: kernels read them from the sequence lengths of the step. A plan
    is therefore valid until a row joins, leaves, moves or comes to share a further block.
    """

    node_blocks: Int32s
    node_block_offsets: Int32s
    node_tokens: Int32s
    """Number of shared tokens per node; its last block may be shared in part."""
    node_rows: Int32s
    node_row_offsets: Int32s
    suffix_starts: Int32s
    """Start of the suffix per row: the sum of its nodes' tokens."""

"""Host copies of the block tables used on a GPU, for both of vLLM's model runners.

A metadata builder receives device tables, and reading them back would synchronize. The first runner
(`v1/worker/block_table.py`) keeps each table on the host and copies it to the device; the pair of
host table and device address is recorded at each copy. The second runner
(`v1/worker/gpu/block_table.py`) sends only changes, so they are also written to a mirror on the
host, from which a step's rows are selected by their index in the runner's request table.

On CPU this is not needed: the device's table is the host's.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.runtime.feature_guard import feature
from kernels.shared_prefix_attention.sharing_plan import Int32s

FEATURE = feature("shared-prefix attention")


@dataclass(frozen=True, slots=True)
class _HostTable:
    """Host copy of one block table.

    `by_request`: rows are in the order of the runner's request table, not of the step's batch.
    """

    table: Int32s
    by_request: bool


_hosts: dict[int, _HostTable] = {}


def host_table(device_table: Any, rows: Sequence[int] | None, num_rows: int) -> Int32s | None:
    """Host copy of a step's rows of a device block table; None if no copy was recorded."""
    host = _hosts.get(device_table.data_ptr())
    if host is None:
        return None
    if not host.by_request:
        return host.table[:num_rows]
    return None if rows is None else host.table[np.asarray(rows[:num_rows])]


def record_table(block_table: Any) -> None:
    """Record a host `BlockTable` that the first runner is about to copy to the device."""
    address = block_table.block_table.gpu.data_ptr()
    _hosts[address] = _HostTable(block_table.block_table.np, by_request=False)


def record_blocks(
    block_tables: Any, req_index: int, new_block_ids: Sequence[Sequence[int]], overwrite: bool
) -> None:
    """Record blocks that the second runner adds to a request, before it updates `num_blocks`."""
    for group, block_ids in enumerate(new_block_ids):
        address = block_tables.input_block_tables[group].data_ptr()
        if address not in _hosts:
            shape = tuple(block_tables.input_block_tables[group].shape)
            _hosts[address] = _HostTable(np.zeros(shape, dtype=np.int32), by_request=True)
        start = 0 if overwrite else int(block_tables.num_blocks.np[group, req_index])
        written = 0 if block_tables.redirect_writes_to_null_block else block_ids
        _hosts[address].table[req_index, start : start + len(block_ids)] = written


@functools.cache
def install() -> None:
    from vllm.v1.worker.block_table import BlockTable
    from vllm.v1.worker.gpu.block_table import BlockTables

    commit, append = BlockTable.commit_block_table, BlockTables.append_block_ids
    recorded_table = FEATURE.guarded_with_default(None)(record_table)
    recorded_blocks = FEATURE.guarded_with_default(None)(record_blocks)

    @functools.wraps(commit)
    def commit_block_table(self: Any, num_reqs: int) -> None:
        recorded_table(self)
        commit(self, num_reqs)

    @functools.wraps(append)
    def append_block_ids(self: Any, *given: Any, **named: Any) -> None:
        recorded_blocks(self, *given, **named)
        append(self, *given, **named)

    BlockTable.commit_block_table = commit_block_table
    BlockTables.append_block_ids = append_block_ids

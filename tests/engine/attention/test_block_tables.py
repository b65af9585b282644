"""The host's copy of a device's block table is that of the step, for both model runners."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention.block_tables import host_table, record_blocks, record_table


def first_runners(rows: list[list[int]]) -> Any:
    """As vLLM's `BlockTable` keeps it: a table on the host, and one on the device."""
    host = np.array(rows, dtype=np.int32)
    device = torch.zeros(host.shape, dtype=torch.int32)
    return SimpleNamespace(block_table=SimpleNamespace(np=host, gpu=device))


class SecondRunners:
    """What `record_blocks` uses of vLLM's `BlockTables`, with two groups of layers."""

    redirect_writes_to_null_block = False

    def __init__(self) -> None:
        self.input_block_tables = [torch.zeros(4, 6, dtype=torch.int32) for _ in range(2)]
        self.num_blocks = SimpleNamespace(np=np.zeros((2, 4), dtype=np.int32))

    def append(self, request: int, blocks: list[int], *, overwrite: bool = False) -> None:
        given = (blocks, [10 * block for block in blocks])
        record_blocks(self, request, given, overwrite)
        before = 0 if overwrite else self.num_blocks.np[:, request]
        self.num_blocks.np[:, request] = before + len(blocks)


def test_the_first_runners_table_is_the_one_that_is_copied() -> None:
    table = first_runners([[1, 2], [1, 3], [0, 0]])
    assert host_table(table.block_table.gpu, None, 2) is None
    record_table(table)
    table.block_table.np[1, 1] = 4
    seen = host_table(table.block_table.gpu[:2], None, 2)
    assert seen is not None and seen.tolist() == [[1, 2], [1, 4]]


def test_the_second_runners_blocks_are_mirrored_by_request() -> None:
    tables = SecondRunners()
    tables.append(2, [5, 6], overwrite=True)
    tables.append(0, [5, 7], overwrite=True)
    tables.append(2, [8])
    for group, factor in enumerate((1, 10)):
        device = tables.input_block_tables[group][:3]
        seen = host_table(device, [2, 0], 2)
        assert seen is not None
        assert seen[:, :3].tolist() == [
            [5 * factor, 6 * factor, 8 * factor],
            [5 * factor, 7 * factor, 0],
        ]
        assert host_table(device, None, 2) is None
    tables.append(2, [9], overwrite=True)
    seen = host_table(tables.input_block_tables[0], [2], 1)
    assert seen is not None and seen[0, 0] == 9


def test_blocks_that_a_warm_up_redirects_are_the_null_block() -> None:
    tables = SecondRunners()
    tables.redirect_writes_to_null_block = True
    tables.append(1, [5, 6], overwrite=True)
    seen = host_table(tables.input_block_tables[0], [1], 1)
    assert seen is not None and seen[0, :2].tolist() == [0, 0]


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
def test_vllm_has_what_is_wrapped_and_read() -> None:
    """Neither runner's class can be made without a GPU; that their names are there can be seen."""
    import inspect

    from vllm.v1.worker.block_table import BlockTable
    from vllm.v1.worker.gpu.block_table import BlockTables

    assert list(inspect.signature(BlockTable.commit_block_table).parameters) == ["self", "num_reqs"]
    appended = ["self", "req_index", "new_block_ids", "overwrite"]
    assert list(inspect.signature(BlockTables.append_block_ids).parameters) == appended
    source = inspect.getsource(BlockTables)
    assert "input_block_tables" in source and "redirect_writes_to_null_block" in source

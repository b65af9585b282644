"""The host copy of a device's block table matches the step, for both model runners."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention.host_block_tables import host_table, record_blocks, record_table


def first_runners(rows: list[list[int]]) -> Any:
    """A block table as vLLM's `BlockTable` keeps it: on the host and on the device."""
    host = np.array(rows, dtype=np.int32)
    device = torch.zeros(host.shape, dtype=torch.int32)
    return SimpleNamespace(block_table=SimpleNamespace(np=host, gpu=device))


class SecondRunners:
    """The part of vLLM's `BlockTables` that `record_blocks` uses, with two groups of layers."""

    redirect_writes_to_null_block = False

    def __init__(self) -> None:
        self.input_block_tables = [torch.zeros(4, 6, dtype=torch.int32) for _ in range(2)]
        self.num_blocks = SimpleNamespace(np=np.zeros((2, 4), dtype=np.int32))

    def append(self, request: int, blocks: list[int], *, overwrite: bool = False) -> None:
        given = (blocks, [10 * block for block in blocks])
        record_blocks(self, request, given, overwrite)
        before = 0 if overwrite else self.num_blocks.np[:, request]
        self.num_blocks.np[:, request] = before + len(blocks)


def test_v1_runner_copies_its_host_table() -> None:
    table = first_runners([[1, 2], [1, 3], [0, 0]])
    assert host_table(table.block_table.gpu, None, 2) is None
    record_table(table)
    table.block_table.np[1, 1] = 4
    seen = host_table(table.block_table.gpu[:2], None, 2)
    assert seen is not None and seen.tolist() == [[1, 2], [1, 4]]


def test_v2_runner_blocks_are_mirrored_per_request() -> None:
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


def test_blocks_redirected_by_a_warm_up_are_the_null_block() -> None:
    tables = SecondRunners()
    tables.redirect_writes_to_null_block = True
    tables.append(1, [5, 6], overwrite=True)
    seen = host_table(tables.input_block_tables[0], [1], 1)
    assert seen is not None and seen[0, :2].tolist() == [0, 0]


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
def test_wrapped_vllm_names_exist() -> None:
    """Neither runner's class can be instantiated without a GPU, so only the names are checked."""
    import inspect

    from vllm.v1.worker.block_table import BlockTable
    from vllm.v1.worker.gpu.block_table import BlockTables

    assert list(inspect.signature(BlockTable.commit_block_table).parameters) == ["self", "num_reqs"]
    appended = ["self", "req_index", "new_block_ids", "overwrite"]
    assert list(inspect.signature(BlockTables.append_block_ids).parameters) == appended
    source = inspect.getsource(BlockTables)
    assert "input_block_tables" in source and "redirect_writes_to_null_block" in source

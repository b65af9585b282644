"""Work lists for steps of the tests, and the Triton kernels' results."""

import torch
from torch import Tensor

from kernels.shared_prefix_attention import cuda
from kernels.shared_prefix_attention.gpu_work_list import WorkList, WorkShape
from tests.kernels.attention_reference import Step
from tests.kernels.decode_steps import Shape


def work_list(
    shape: Shape, *, num_rows: int, query_tokens: int = 1, num_processors: int = 2, device: str
) -> WorkList:
    sizes = WorkShape(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        block_size=shape.block_size,
        max_rows=num_rows,
        max_query_tokens=query_tokens,
        max_node_blocks=1024,
        num_processors=num_processors,
    )
    return WorkList(sizes, torch.device(device))


class Inputs:
    """A step's tensors on a device, at fixed addresses: a captured graph reads them again."""

    def __init__(self, step: Step, dtype: torch.dtype, device: str) -> None:
        self.query = step.query.to(device, dtype)
        self.key_cache = step.keys.to(device, dtype)
        self.value_cache = step.values.to(device, dtype)
        self.block_table = step.block_table.to(device)
        self.seq_lens = step.seq_lens.to(device)
        self.query_start_loc = step.query_start_loc.to(device)
        self.scale = step.scale
        self.out = torch.full_like(self.query, torch.nan)

    def run_decode(self, work: WorkList) -> Tensor:
        cuda.decode(
            work,
            query=self.query,
            key_cache=self.key_cache,
            value_cache=self.value_cache,
            block_table=self.block_table,
            seq_lens=self.seq_lens,
            query_start_loc=self.query_start_loc,
            scale=self.scale,
            out=self.out,
        )
        return self.out

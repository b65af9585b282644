"""Model Runner V2 on a machine without a GPU, as far as attention is concerned.

Block tables, the gathering of a step's rows and the building of attention metadata are vLLM's own.
Replaced are the transfers to the GPU, FlashAttention, and the merge kernel.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention import cuda_steps
from engine.attention.counters import Counters
from engine.attention.grouping import StepGrouper
from kernels.shared_prefix_attention import cuda
from tests.kernels import attention_reference
from tests.kernels.flash_attention import flash_attn_varlen_func

BLOCK, HEADS, KV_HEADS, SIZE = 32, 4, 2, 64
MAX_REQS, MAX_BLOCKS = 8, 12


class StagedTensor:
    """vLLM's `StagedWriteTensor` with writes that take effect at once."""

    def __init__(self, size: Any, dtype: torch.dtype, device: torch.device) -> None:
        self.gpu = torch.zeros(size, dtype=dtype, device=device)

    def stage_write(self, index: int, start: int, x: list[int]) -> None:
        self.gpu[index, start : start + len(x)] = torch.tensor(x, dtype=self.gpu.dtype)


class HostTensor:
    """vLLM's `UvaBackedTensor` without the view that the GPU reads."""

    def __init__(self, size: Any, dtype: torch.dtype) -> None:
        self.np = torch.zeros(size, dtype=dtype).numpy()


@contextmanager
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from vllm.v1.attention.backends import fa_utils, flash_attn
    from vllm.v1.worker.gpu import block_table
    from vllm.v1.worker.gpu.block_table import BlockTables
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    for holder in (fa_utils, flash_attn):
        monkeypatch.setattr(holder, "flash_attn_varlen_func", flash_attn_varlen_func, raising=False)
    monkeypatch.setattr(block_table, "StagedWriteTensor", StagedTensor)
    monkeypatch.setattr(block_table, "UvaBackedTensor", HostTensor)
    monkeypatch.setattr(block_table, "FusedStagedWriter", lambda *_: None)
    monkeypatch.setattr(cuda, "merge", merge)
    names = {BlockTables: ["__init__", "append_block_ids"]}
    names[GPUModelRunner] = ["gather_batch_req_state"]
    for cls, methods in names.items():
        for name in methods:  # restored after the test
            monkeypatch.setattr(cls, name, getattr(cls, name))
    monkeypatch.setattr(cuda_steps, "_step_shares", False)
    cuda_steps.install.__wrapped__()
    yield


def merge(
    lists: cuda.StepLists,
    part_outs: torch.Tensor,
    part_lses: torch.Tensor,
    outs: torch.Tensor,
    lses: torch.Tensor,
) -> None:
    """The merge kernel's result, by the reference implementation."""
    offsets, parts = lists.token_part_offsets.tolist(), lists.token_parts.long()
    for token in range(len(outs)):
        mine = parts[offsets[token] : offsets[token + 1]]
        all_outs = torch.cat([outs[token : token + 1], part_outs[mine]]).float()
        all_lses = torch.cat([lses[:, token : token + 1], part_lses[:, mine]], dim=1).T
        outs[token] = attention_reference.merge(all_outs, all_lses)[0].to(outs.dtype)


def block_tables(num_groups: int = 1) -> Any:
    from vllm.v1.worker.gpu.block_table import BlockTables

    return BlockTables(
        block_sizes=[BLOCK] * num_groups,
        max_num_reqs=MAX_REQS,
        max_num_batched_tokens=64,
        max_num_blocks_per_group=[MAX_BLOCKS] * num_groups,
        device=torch.device("cpu"),
    )


def builder() -> Any:
    """A metadata builder with the attributes that a step needs; its constructor needs a GPU."""
    from engine.attention.cuda_backend import SharedPrefixBuilder

    made = object.__new__(SharedPrefixBuilder)
    made.device, made.block_size = torch.device("cpu"), BLOCK
    made._planned = made._lists = None
    made.aot_schedule = made.use_full_cuda_graph = False
    made.max_cudagraph_size, made.max_num_splits, made.dcp_world_size = 512, 32, 1
    made.aot_sliding_window, made.mm_prefix_query_ranges_np, made.rswa_window = (-1, -1), None, None
    made.grouper = StepGrouper(
        mode="always", block_size=BLOCK, bytes_per_token=1, max_query_tokens=64, counts=Counters()
    )
    return made


class Runner:
    """The parts of vLLM's `GPUModelRunner` that a step's attention metadata depends on."""

    decode_query_len, pcp_manager, use_pp, adaptive_verification = 1, None, False, None

    def __init__(self, mode: str = "FULL_AND_PIECEWISE") -> None:
        from vllm.config import CUDAGraphMode

        self.attn_groups: list[list[Any]] = [[]]
        self.builder = self.add_group("layer")
        self.speculator: Any = None
        self.block_tables = block_tables()
        self.cudagraph_manager: Any = SimpleNamespace(
            cudagraph_mode=CUDAGraphMode[mode], varlen_decode=False
        )
        self.req_states = SimpleNamespace(
            req_id_to_index={},
            prefill_len=SimpleNamespace(np=np.zeros(MAX_REQS, np.int32)),
            num_computed_prefill_tokens=np.zeros(MAX_REQS, np.int32),
            num_computed_tokens_np=np.zeros(MAX_REQS, np.int32),
        )
        self.batch: Any = None

    def tear_down(self) -> None:
        """As `_teardown_profiling_state` and `shutdown` leave the runner."""
        self.attn_groups.clear()
        self.cudagraph_manager = None

    def add_group(self, *layer_names: str) -> Any:
        """Add a group of layers with its own builder to the first KV cache group."""
        from vllm.v1.worker.utils import AttentionGroup

        from engine.attention.cuda_backend import SharedPrefixBackend

        group = AttentionGroup(SharedPrefixBackend, list(layer_names), None, 0)
        group.metadata_builders = [builder()]
        self.attn_groups[0].append(group)
        return group.metadata_builders[0]

    def add(self, name: str, blocks: list[int], *, computed: int, prompt: int = 0) -> None:
        states, index = self.req_states, len(self.req_states.req_id_to_index)
        states.req_id_to_index[name] = index
        states.prefill_len.np[index] = prompt
        states.num_computed_tokens_np[index] = computed
        states.num_computed_prefill_tokens[index] = min(computed, prompt)
        self.block_tables.append_block_ids(index, [blocks], overwrite=True)

    def gather(self, scheduled: dict[str, int], *, dummy_run: bool = False) -> int | None:
        """Gather the rows of a step; returns their uniform number of query tokens, if any."""
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner

        output = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_spec_decode_tokens={},
        )
        gather: Any = GPUModelRunner.gather_batch_req_state
        batch, uniform = gather(self, output, dummy_run)
        self.batch = batch or self.batch
        return uniform  # type: ignore[no-any-return]

    def metadata(self, *, as_draft_model: bool = False) -> Any:
        """Attention metadata of the gathered step, or of a draft model for the same rows."""
        index = self.batch.idx_mapping_np
        lens = self.req_states.num_computed_tokens_np[index] + self.batch.num_scheduled_tokens
        table = torch.stack([self.block_tables.block_tables[0].gpu[i] for i in index.tolist()])
        return self._build(
            self.batch.num_scheduled_tokens, lens, table, None if as_draft_model else index
        )

    def dummy_metadata(self, num_reqs: int, *, for_capture: bool) -> Any:
        """Attention metadata of a dummy step, before any request exists."""
        table = self.block_tables.get_dummy_block_tables(num_reqs)[0]
        ones = np.ones(num_reqs, np.int32)
        return self._build(ones, ones, table, np.arange(num_reqs), for_capture=for_capture)

    def _build(
        self, query_lens: Any, lens: Any, table: Any, req_idx: Any, *, for_capture: bool = False
    ) -> Any:
        from vllm.v1.worker.gpu.attn_utils import build_attn_metadata

        starts = torch.from_numpy(np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32))
        seq_lens, tokens = torch.from_numpy(lens.astype(np.int32)), int(starts[-1])
        return build_attn_metadata(
            attn_groups=self.attn_groups,
            num_reqs=len(lens),
            num_tokens=tokens,
            query_start_loc_gpu=starts,
            query_start_loc_cpu=starts,
            max_query_len=int(query_lens.max()),
            seq_lens=seq_lens,
            max_seq_len=int(lens.max()),
            block_tables=[table],
            slot_mappings=torch.zeros(1, tokens, dtype=torch.int64),
            kv_cache_config=SimpleNamespace(kv_cache_groups=[None]),
            seq_lens_cpu_upper_bound=seq_lens,
            for_cudagraph_capture=for_capture,
            req_idx=req_idx,
        )["layer"]

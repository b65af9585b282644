"""Steps of Model Runner V2 around a speculator with a draft model, on a machine without a GPU.

The speculators, the block tables and the building of attention metadata are vLLM's own, and its
Triton kernels run in Triton's interpreter. Replaced are the served model, whose acceptances are
given, and the draft model: its hidden state is a hash of all tokens that its KV cache has for the
row, so a missing or wrong entry changes the draft.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.attention.second_runner import HostTensor, StagedTensor
from tests.engine.cudagraphs.managers import config_of, no_gpu_needed

BLOCK, MAX_REQS, MAX_TOKENS, MAX_LEN = 4, 4, 16, 256
NUM_BLOCKS, LONGEST, VOCAB = 96, 3, 61
CPU = torch.device("cpu")
SCHEDULE = [(1, 1, 3), (2, 2, 2), (3, 3, 1), (4, MAX_REQS, 0)]


@contextmanager
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's Triton kernels in Triton's interpreter, and no pinned memory."""
    from vllm.v1.worker.gpu import block_table, buffer_utils
    from vllm.v1.worker.gpu.spec_decode import speculator
    from vllm.v1.worker.gpu.spec_decode.standalone_ar import speculator as standalone

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for module in (block_table, standalone, buffer_utils):
        interpret(monkeypatch, module)
    load = buffer_utils._load_ptr
    monkeypatch.setattr(block_table, "_load_ptr", load)
    monkeypatch.setattr(block_table, "StagedWriteTensor", StagedTensor)
    monkeypatch.setattr(block_table, "UvaBackedTensor", HostTensor)
    monkeypatch.setattr(speculator, "_target_feeds_hc_residual", lambda _: False)
    with no_gpu_needed():
        yield


def interpret(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    from triton import language
    from triton.runtime.interpreter import InterpretedFunction

    monkeypatch.setattr(module, "tl", language)
    for name, value in list(vars(module).items()):
        if callable(value) and (name.endswith("_kernel") or name == "_load_ptr"):
            monkeypatch.setattr(module, name, InterpretedFunction(value))


class Builder:
    """Metadata builder that keeps what the draft model below reads."""

    supports_update_block_table = False
    supports_draft_decode_metadata_update = False

    def __init__(self) -> None:
        self.num_updates = 0

    def build(self, common_prefix_len: int, common_attn_metadata: Any, **unused: Any) -> Any:
        common = common_attn_metadata
        assert common.query_start_loc.tolist() == common.query_start_loc_cpu.tolist()
        assert int(common.query_start_loc_cpu[-1]) <= common.num_actual_tokens
        return SimpleNamespace(
            starts=common.query_start_loc,
            seq_lens=common.seq_lens,
            table=common.block_table_tensor,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        return self.build(0, common_attn_metadata)

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        self.num_updates += 1


class DraftModel(torch.nn.Module):
    """Draft model whose KV cache holds tokens, and whose logits are a hash of a row's tokens.

    `passes` lists the number of tokens of every pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cache = torch.full((NUM_BLOCKS * BLOCK,), -1, dtype=torch.int64)
        self.passes: list[int] = []

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        from vllm.forward_context import get_forward_context

        context = get_forward_context()
        self.passes.append(len(input_ids))
        slots = context.slot_mapping["draft"][: len(input_ids)]
        self.cache[slots[slots >= 0]] = input_ids[slots >= 0].long()
        metadata, hashes = context.attn_metadata["draft"], torch.zeros(len(input_ids), 1)
        starts = metadata.starts.tolist()
        for row, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
            for token in range(start, end):
                length = int(metadata.seq_lens[row]) - (end - 1 - token)
                at = torch.arange(max(length, 0))
                kept = self.cache[metadata.table[row].long()[at // BLOCK] * BLOCK + at % BLOCK]
                hashes[token] = float(((kept + 2) * (at + 1)).sum() % VOCAB)
        return hashes

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(hidden_states[:, 0].long(), VOCAB).float()


class Row:
    """A request: its true tokens, its blocks, and its computed tokens as known to GPU and host."""

    def __init__(self, state: int, tokens: Sequence[int], blocks: list[int]) -> None:
        self.state, self.tokens, self.blocks = state, list(tokens), blocks
        self.num_computed = self.host_computed = len(blocks) * BLOCK
        self.num_rejected = 0

    @property
    def is_prefilling(self) -> bool:
        return len(self.tokens) - self.num_computed > 1

    def next_tokens(self, num: int) -> list[int]:
        """The tokens that the served model will sample next."""
        first = len(self.tokens)
        return [(7 + 5 * self.state + 3 * (first + i)) % VOCAB for i in range(num)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Drafts that a row verifies in a step, and how many of them are accepted."""

    num_drafts: int = 0
    num_accepted: int = 0


@dataclass
class Runner:
    """Steps of rows, in each of which a speculator proposes drafts.

    The host learns the number of rejected drafts one step late, as under asynchronous scheduling.
    """

    speculator: Any
    rows: dict[str, Row] = field(default_factory=dict)
    num_blocks: int = 1

    @property
    def model(self) -> DraftModel:
        model: DraftModel = self.speculator.model
        return model

    def add(self, name: str, tokens: Sequence[int], *, prefix_of: str = "") -> None:
        """Add a request; the full blocks that it has in common with another are a cached prefix."""
        shared = self._shared_blocks(self.rows[prefix_of], tokens) if prefix_of else []
        row = self.rows[name] = Row(len(self.rows), tokens, shared)
        self.speculator.req_states.all_token_ids.gpu[row.state, : len(tokens)] = torch.tensor(
            tokens
        )
        self._grow(row, overwrite=True)

    def _shared_blocks(self, other: Row, tokens: Sequence[int]) -> list[int]:
        most = min(len(tokens) - 1, other.num_computed)
        equal = [a == b for a, b in zip(other.tokens[:most], tokens[:most], strict=True)]
        return other.blocks[: (equal + [False]).index(False) // BLOCK]

    def step(
        self,
        names: Sequence[str],
        length: int,
        verified: Verified = Verified(),
        *,
        prompt_tokens: int = MAX_TOKENS,
    ) -> list[list[int]]:
        """Run a step; returns the drafts made in it.

        Rows that prefill compute up to `prompt_tokens` tokens; all others verify drafts.
        """
        rows = [self.rows[name] for name in names]
        inputs = [_inputs(row, verified, prompt_tokens) for row in rows]
        batch = self._batch(rows, inputs)
        rejected = [
            self._advance(row, tokens, verified) for row, tokens in zip(rows, inputs, strict=True)
        ]
        drafts = self._propose(batch, rejected, length)
        for row in rows:
            self._grow(row, overwrite=False)
        return drafts

    def _advance(self, row: Row, inputs: Sequence[int], verified: Verified) -> int:
        """Sample after the step's tokens; returns the number of rejected drafts."""
        decodes = not row.is_prefilling
        rejected = verified.num_drafts - verified.num_accepted if decodes else 0
        ended = row.num_computed + len(inputs) >= len(row.tokens)
        accepted = verified.num_accepted if decodes else 0
        sampled = row.next_tokens(accepted + 1) if ended else []
        row.host_computed += len(inputs) - row.num_rejected
        row.num_rejected = rejected
        row.num_computed += len(inputs) - rejected
        row.tokens += sampled
        states = self.speculator.req_states
        states.all_token_ids.gpu[row.state, : len(row.tokens)] = torch.tensor(row.tokens)
        states.last_sampled_tokens[row.state] = row.tokens[-1]
        return rejected

    def _propose(self, batch: Any, rejected: list[int], length: int) -> list[list[int]]:
        made = self.speculator.propose(
            batch,
            attn_metadata=None,
            slot_mappings=None,
            last_hidden_states=None,
            aux_hidden_states=None,
            num_sampled=torch.ones(batch.num_reqs),
            num_rejected=torch.tensor(rejected, dtype=torch.int32),
            last_sampled=self.speculator.req_states.last_sampled_tokens,
            next_prefill_tokens=torch.zeros(1, MAX_REQS),
            temperature=torch.zeros(MAX_REQS),
            seeds=torch.zeros(MAX_REQS, dtype=torch.int64),
            num_speculative_tokens=length,
        )
        return [drafts[:length] for drafts in made.tolist()]

    def _grow(self, row: Row, *, overwrite: bool) -> None:
        """Allocate blocks for the next step's tokens and drafts."""
        needed = -(-(len(row.tokens) + 2 * LONGEST + 1) // BLOCK) - len(row.blocks)
        new = list(range(self.num_blocks, self.num_blocks + max(needed, 0)))
        assert self.num_blocks + len(new) <= NUM_BLOCKS, "the test needs more blocks"
        self.num_blocks += len(new)
        row.blocks = row.blocks + new
        if new or overwrite:
            added = row.blocks if overwrite else new
            tables = self.speculator.block_tables
            tables.append_block_ids(row.state, (list(added),), overwrite=overwrite)

    def _batch(self, rows: list[Row], inputs: list[list[int]]) -> Any:
        """vLLM's InputBatch, as far as speculators with a draft model read it."""
        index = np.array([row.state for row in rows])
        counts = np.array([len(tokens) for tokens in inputs], np.int32)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        begins = np.array([row.num_computed for row in rows])
        host = np.array([row.host_computed for row in rows], np.int32)
        offsets = [begin + np.arange(n) for begin, n in zip(begins, counts, strict=True)]
        prefilling = np.array([row.is_prefilling for row in rows])
        self.speculator.block_tables.gather_block_tables(torch.from_numpy(index), len(rows))
        return SimpleNamespace(
            num_reqs=len(rows),
            idx_mapping=torch.from_numpy(index),
            idx_mapping_np=index,
            num_scheduled_tokens=counts,
            num_tokens=int(starts[-1]),
            num_computed_tokens_np=host,
            is_prefilling_np=prefilling,
            decode_graph_eligible=not prefilling.any(),
            query_start_loc=torch.from_numpy(starts),
            query_start_loc_np=starts,
            seq_lens=torch.from_numpy((begins + counts).astype(np.int32)),
            seq_lens_cpu_upper_bound=torch.from_numpy((host + counts).astype(np.int32)),
            input_ids=torch.tensor([token for one in inputs for token in one], dtype=torch.int32),
            positions=torch.from_numpy(np.concatenate(offsets)),
        )


def _inputs(row: Row, verified: Verified, prompt_tokens: int) -> list[int]:
    """Tokens that a row computes in a step; drafts that are rejected differ from the true text."""
    if row.is_prefilling:
        return row.tokens[row.num_computed :][:prompt_tokens]
    text = row.next_tokens(verified.num_drafts)
    wrong = [(token + 1) % VOCAB for token in text]
    cut = verified.num_accepted
    return [row.tokens[-1], *text[:cut], *wrong[cut:]]


class Graph:
    """CUDA graph whose replay calls the captured pass again, on the same tensors."""

    capturing: "Graph | None" = None

    def __init__(self) -> None:
        self.call: Callable[[], None] | None = None
        self.num_replays = 0

    def replay(self) -> None:
        assert self.call is not None, "captured"
        self.num_replays += 1
        self.call()


@contextmanager
def capturing(graph: Graph, *_: Any, **__: Any) -> Iterator[None]:
    Graph.capturing = graph
    try:
        yield
    finally:
        Graph.capturing = None


def recorded(run_pass: Callable[..., None]) -> Callable[..., None]:
    """A pass that a graph can capture."""

    def run(*args: Any, **named: Any) -> None:
        if Graph.capturing is not None:
            Graph.capturing.call = partial(run_pass, *args, **named)
        else:
            run_pass(*args, **named)

    return run


def capture(runner: Runner) -> None:
    """Capture the speculator's graphs with vLLM's own loop."""
    speculator = runner.speculator
    speculator._first_pass = recorded(speculator._first_pass)
    speculator._later_pass = recorded(speculator._later_pass)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "graph", capturing)
        speculator.capture()
    runner.model.passes.clear()
    runner.model.cache.fill_(-1)


def make_runner(cls: Any = None, **attention: Any) -> Runner:
    """A runner around a speculator: ours, or vLLM's."""
    from vllm.config import set_current_vllm_config

    from engine.drafter.worker.draft_speculator import DraftSpeculator

    cls = cls or DraftSpeculator
    config = config_of(
        SCHEDULE, max_sequences=MAX_REQS, max_tokens=MAX_TOKENS, sizes=[1, 2, 4, 8, 16]
    )
    with set_current_vllm_config(config):
        speculator = cls(config, CPU, None) if cls is DraftSpeculator else cls(config, CPU)
        set_up(speculator, **attention)
        return Runner(speculator)


def set_up(
    speculator: Any,
    *,
    updates_metadata: bool = False,
    graph_support: str = "ALWAYS",
    window: int | None = None,
) -> None:
    """Give a speculator the draft model, block tables and attention that vLLM would set.

    `updates_metadata`: the attention backend can update its metadata within a graph.
    """
    from vllm.config import CUDAGraphMode
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
    from vllm.v1.worker.gpu.block_table import BlockTables
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState
    from vllm.v1.worker.gpu.spec_decode import speculator as base
    from vllm.v1.worker.utils import AttentionGroup

    speculator.model = DraftModel()
    speculator.req_states = SimpleNamespace(
        all_token_ids=SimpleNamespace(gpu=torch.zeros(MAX_REQS, MAX_LEN, dtype=torch.int32)),
        last_sampled_tokens=torch.zeros(MAX_REQS, 1, dtype=torch.int64),
    )
    shape: dict[str, Any] = {
        "block_size": BLOCK,
        "num_kv_heads": 1,
        "head_size": 8,
        "dtype": torch.float32,
    }
    spec = (
        SlidingWindowSpec(**shape, sliding_window=window) if window else FullAttentionSpec(**shape)
    )
    backend: Any = SimpleNamespace(get_name=lambda: "fake")
    group, builder = AttentionGroup(backend, ["draft"], spec, 0), Builder()
    builder.supports_draft_decode_metadata_update = updates_metadata
    group.metadata_builders = [builder]
    tables = BlockTables(
        block_sizes=[BLOCK],
        max_num_reqs=MAX_REQS,
        max_num_batched_tokens=MAX_TOKENS,
        max_num_blocks_per_group=[MAX_LEN // BLOCK],
        device=CPU,
    )
    tables.num_blocks.gpu = torch.from_numpy(tables.num_blocks.np)
    support = SimpleNamespace(min_cg_support=AttentionCGSupport[graph_support])
    state = SimpleNamespace(max_model_len=MAX_LEN, supports_mm_inputs=False, rswa_window=None)
    state.prepare_attn = partial(DefaultModelState.prepare_attn, state)
    kv_config = SimpleNamespace(
        num_blocks=NUM_BLOCKS,
        kv_cache_groups=[SimpleNamespace(layer_names=["draft"], kv_cache_spec=spec)],
    )
    speculator.draft_attn_layer_names = {"draft"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "init_attn_backend", lambda *_, **__: ([[group]], support, None))
        speculator.set_attn(state, kv_config, tables, None, None)
    speculator.init_cudagraph_manager(CUDAGraphMode.FULL_AND_PIECEWISE)

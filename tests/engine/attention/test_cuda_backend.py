"""The GPU backend on Model Runner V2, as far as it can be checked without a GPU."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.attention import cuda_steps, register
from engine.attention.counters import COUNTERS
from engine.attention.register import FEATURE
from engine.attention.settings import AttentionSettings
from tests.engine.attention.second_runner import (
    BLOCK,
    HEADS,
    KV_HEADS,
    SIZE,
    Runner,
    block_tables,
    without_gpu,
)

# Importing vLLM without a GPU emits unrelated warnings.
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

SHARED = {"a": [1, 2, 3], "b": [1, 2, 4], "c": [5, 6, 7]}
"""Blocks of three requests, of which two share 64 tokens."""


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(register, "_settings", AttentionSettings(shared_prefix="always"))
    with without_gpu(monkeypatch):
        yield
    assert FEATURE.state.on and cuda_steps.FEATURE.state.on


def decoding(requests: dict[str, list[int]], mode: str = "FULL_AND_PIECEWISE") -> Runner:
    runner = Runner(mode)
    for number, (name, blocks) in enumerate(requests.items()):
        runner.add(name, blocks, computed=len(blocks) * BLOCK - 5 - number)
    return runner


def is_shared(metadata: Any) -> bool:
    from engine.attention.cuda_backend import SharedPrefixMetadata

    return isinstance(metadata, SharedPrefixMetadata)


def layer_outputs(metadata: Any, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of an attention layer for the given metadata and for vLLM's own."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

    from engine.attention.cuda_backend import SharedPrefixImpl

    impl = object.__new__(SharedPrefixImpl)
    impl._is_supported, impl.head_size, impl.num_kv_heads, impl.scale = True, SIZE, KV_HEADS, 0.125
    impl.vllm_flash_attn_version, impl.logits_soft_cap, impl.alibi_slopes = 3, 0, None
    impl.sliding_window, impl.sinks, impl.kv_cache_dtype = (-1, -1), None, "auto"
    impl.attn_type, impl.fa4_hd256, impl.dcp_world_size = "decoder", False, 1
    impl.supports_quant_query_input = False
    layer: Any = SimpleNamespace(_k_scale=torch.ones(1), _v_scale=torch.ones(1))
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(num_tokens + 3, HEADS, SIZE, generator=generator).bfloat16()
    cache = torch.randn(16, KV_HEADS, BLOCK, 2 * SIZE, generator=generator).bfloat16()
    fields = FlashAttentionMetadata.__dataclass_fields__
    stock = FlashAttentionMetadata(**{name: getattr(metadata, name) for name in fields})
    outputs = torch.zeros(2, *query.shape, dtype=query.dtype)
    for out, step in zip(outputs, (metadata, stock), strict=True):
        impl.forward(layer, query, query, query, cache, step, out)
    return outputs[0], outputs[1]


def assert_as_stock(metadata: Any, num_tokens: int) -> None:
    shared, stock = layer_outputs(metadata, num_tokens)
    torch.testing.assert_close(shared, stock, atol=2e-2, rtol=0)
    assert not shared[num_tokens:].any()


def test_decode_step_shares_its_prefix() -> None:
    runner = decoding(SHARED)
    assert runner.gather(dict.fromkeys("abc", 1)) is None  # no graph for decode rows only
    metadata = runner.metadata()
    assert is_shared(metadata) and metadata.tail is None
    assert metadata.lists.node_tokens.tolist() == [2 * BLOCK]
    assert_as_stock(metadata, 3)


def test_step_with_prefill_rows_and_drafts_shares_too() -> None:
    runner = decoding(SHARED)
    runner.add("d", [1, 2, 8, 9], computed=2 * BLOCK, prompt=4 * BLOCK)
    scheduled = {"a": 3, "b": 1, "c": 1, "d": 40}
    runner.gather(scheduled)
    metadata = runner.metadata()
    assert is_shared(metadata)
    assert metadata.lists.node_query_starts.tolist() == [0, 44]
    assert_as_stock(metadata, 45)


def test_long_prefill_rows_read_their_prefix_themselves() -> None:
    runner = decoding(SHARED)
    runner.add("d", [1, 2, 8, 9, 10], computed=2 * BLOCK, prompt=5 * BLOCK)
    runner.gather({"a": 1, "b": 1, "c": 1, "d": 90})
    metadata = runner.metadata()
    assert metadata.lists.suffix_starts.tolist() == [64, 64, 0, 0]
    assert_as_stock(metadata, 93)


def test_step_without_sharing_keeps_full_graphs_and_stock_attention() -> None:
    runner = decoding({"a": [1, 2], "b": [3, 4]})
    assert runner.gather({"a": 1, "b": 1}) == 1
    assert not is_shared(runner.metadata())


@pytest.mark.parametrize("for_capture", [False, True])
def test_dummy_step_before_any_request_uses_stock_attention(for_capture: bool) -> None:
    """vLLM profiles its graphs' memory and warms up its kernels before any request exists."""
    assert not is_shared(Runner().dummy_metadata(4, for_capture=for_capture))


def test_capture_between_two_steps_uses_stock_attention() -> None:
    runner = decoding(SHARED)
    runner.gather(dict.fromkeys("abc", 1))
    assert not is_shared(runner.dummy_metadata(2, for_capture=False))


def test_draft_model_uses_stock_attention() -> None:
    """A draft model's metadata names no requests, though its rows are those of the step."""
    runner = decoding(SHARED)
    runner.gather(dict.fromkeys("abc", 1))
    assert not is_shared(runner.metadata(as_draft_model=True))
    assert is_shared(runner.metadata())
    assert not is_shared(runner.metadata()), "a plan serves one step"


def test_dummy_run_before_the_kv_cache_is_configured() -> None:
    """vLLM profiles the memory of a step before it creates groups, block tables and graphs."""
    runner = Runner()
    del runner.attn_groups, runner.block_tables
    runner.cudagraph_manager = None
    assert runner.gather({"dummy": 1, "dummy2": 1}, dummy_run=True) == 1


def test_torn_down_runner_shares_nothing() -> None:
    runner = decoding(SHARED)
    assert register.state(runner) == "on"
    runner.tear_down()
    assert runner.gather({"dummy": 1}, dummy_run=True) == 1
    assert runner.gather(dict.fromkeys("abc", 1)) == 1
    assert register.state(runner) == "backend"


def test_draft_layers_do_not_make_the_step_piecewise() -> None:
    runner = decoding(SHARED)
    runner.speculator = SimpleNamespace(draft_attn_layer_names={"draft", "draft2"})
    runner.add_group("draft", "draft2")
    runner.builder.grouper.unsupported = "sinks"
    assert runner.gather(dict.fromkeys("abc", 1)) == 1
    assert register.state(runner) == "sinks"


def test_group_with_layers_of_both_models_shares() -> None:
    runner = decoding(SHARED)
    runner.speculator = SimpleNamespace(draft_attn_layer_names={"draft"})
    runner.attn_groups[0][0].layer_names.append("draft")
    assert runner.gather(dict.fromkeys("abc", 1)) is None


def test_dummy_step_of_the_same_size_uses_stock_attention() -> None:
    runner = decoding(SHARED)
    runner.gather(dict.fromkeys("abc", 1))
    runner.gather({"dummy": 1, "dummy2": 1, "dummy3": 1}, dummy_run=True)
    assert not is_shared(runner.dummy_metadata(3, for_capture=False))


@pytest.mark.parametrize(
    ("mode", "shares"),
    [
        ("FULL_AND_PIECEWISE", True),
        ("PIECEWISE", True),
        ("NONE", True),
        ("FULL", False),
        ("FULL_DECODE_ONLY", False),
    ],
)
def test_graphs_that_would_contain_attention_exclude_sharing(mode: str, shares: bool) -> None:
    runner = decoding(SHARED, mode)
    before = COUNTERS.read()["steps_skipped"].get("cuda_graphs", 0)
    runner.gather(dict.fromkeys("abc", 1))
    assert is_shared(runner.metadata()) == shares
    assert COUNTERS.read()["steps_skipped"].get("cuda_graphs", 0) == before + (not shares)


def test_graphs_for_decode_rows_of_any_length_exclude_sharing() -> None:
    runner = decoding(SHARED)
    runner.cudagraph_manager.varlen_decode = True
    runner.gather(dict.fromkeys("abc", 1))
    assert not is_shared(runner.metadata())


def test_lists_are_uploaded_once_while_the_plan_holds() -> None:
    runner = decoding(SHARED)
    found = []
    for _ in range(2):
        runner.gather(dict.fromkeys("abc", 1))
        found.append(runner.metadata().lists)
        runner.req_states.num_computed_tokens_np[:3] += 1
    assert found[0] is found[1]
    runner.gather({"a": 2, "b": 1, "c": 1})
    assert runner.metadata().lists is not found[0]


def test_failed_plan_leaves_stock_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = decoding(SHARED)
    monkeypatch.setattr(runner.builder, "plan", lambda *_: 1 / 0)
    with monkeypatch.context() as patch:
        patch.setattr(cuda_steps.FEATURE, "state", cuda_steps.FEATURE.state)  # restored after it
        assert runner.gather(dict.fromkeys("abc", 1)) == 1
        assert not cuda_steps.FEATURE.state.on
    assert not is_shared(runner.metadata())


def test_failed_plan_of_one_group_cancels_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = decoding(SHARED)
    monkeypatch.setattr(runner.add_group("other"), "plan", lambda *_: 1 / 0)
    with monkeypatch.context() as patch:
        patch.setattr(cuda_steps.FEATURE, "state", cuda_steps.FEATURE.state)  # restored after it
        assert runner.gather(dict.fromkeys("abc", 1)) == 1
    assert runner.builder._planned is None


def test_failed_pass_leaves_stock_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.shared_prefix_attention import cuda

    runner = decoding(SHARED)
    runner.gather(dict.fromkeys("abc", 1))
    metadata = runner.metadata()
    monkeypatch.setattr(cuda, "attend", lambda *_, **__: 1 / 0)
    with monkeypatch.context() as patch:
        patch.setattr(FEATURE, "state", FEATURE.state)  # restored after it
        shared, stock = layer_outputs(metadata, 3)
        assert not FEATURE.state.on
    torch.testing.assert_close(shared, stock, atol=0, rtol=0)


def test_metadata_of_a_step_is_not_reused_for_another_block_table() -> None:
    from engine.attention.cuda_backend import SharedPrefixBuilder

    assert not SharedPrefixBuilder.supports_update_block_table


def test_mirror_has_the_rows_of_the_requests() -> None:
    import numpy as np

    tables = block_tables(num_groups=2)
    tables.append_block_ids(2, [[5, 6], [50, 60]], overwrite=True)
    tables.append_block_ids(0, [[5, 7, 9], [50, 70]], overwrite=True)
    tables.append_block_ids(2, [[8], [80]], overwrite=False)
    mirror = cuda_steps.host_block_tables(tables)
    assert mirror is not None
    assert mirror.rows(0, np.array([2, 0])).tolist() == [[5, 6, 8], [5, 7, 9]]
    assert mirror.rows(1, np.array([2, 0])).tolist() == [[50, 60, 80], [50, 70, 0]]
    tables.append_block_ids(2, [[9], [90]], overwrite=True)
    assert mirror.rows(0, np.array([2])).tolist() == [[9]]
    tables.redirect_writes_to_null_block = True
    tables.append_block_ids(1, [[4], [40]], overwrite=True)
    assert mirror.rows(0, np.array([1])).tolist() == [[0]]


def test_second_runner_selects_a_piecewise_graph_for_shared_steps() -> None:
    """vLLM's dispatch, with and without a uniform number of query tokens."""
    from vllm.config import CUDAGraphMode

    from tests.engine.cudagraphs.managers import capture, config_of, manager_of, no_gpu_needed

    with no_gpu_needed():
        config = config_of([(1, 8, 0)], max_sequences=8, max_tokens=64)
        manager = manager_of(config)
        capture(manager)
        full = manager.dispatch(3, 3, 1, num_active_loras=0, max_query_len=1)
        shared = manager.dispatch(3, 3, None, num_active_loras=0, max_query_len=1)
    assert (full.cg_mode, shared.cg_mode) == (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE)

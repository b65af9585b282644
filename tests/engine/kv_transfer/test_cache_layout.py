"""Cache layouts that can be exported: keys and values of plain and windowed attention."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.types.kv import ExportSlot, KvFormat
from service.kv.handles.file_layout import LayoutFactory

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

NUM_LAYERS = 3
NAMES = [f"model.layers.{i}.self_attn.attn" for i in range(NUM_LAYERS)]


def plain(**changes: Any) -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    return replace(spec, **changes)


def config(**parallel: int) -> Any:
    sizes = {"pipeline": 1, "decode_context": 1, "prefill_context": 1, "tensor": 1} | parallel
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{f"{k}_parallel_size": v for k, v in sizes.items()}),
        model_config=SimpleNamespace(
            dtype=torch.bfloat16,
            get_total_num_kv_heads=lambda: 2,
            get_total_num_hidden_layers=lambda: NUM_LAYERS,
        ),
    )


def caches(*groups: tuple[list[str], Any]) -> Any:
    made_groups = [SimpleNamespace(layer_names=names, kv_cache_spec=spec) for names, spec in groups]
    return SimpleNamespace(kv_cache_groups=made_groups)


def test_plain_attention_is_exported_in_layer_order() -> None:
    from engine.kv_transfer.cache_layout import cache_layouts

    (layout,) = cache_layouts(config(), caches((NAMES[::-1], plain())))
    assert layout.layers == tuple(NAMES)
    assert (layout.group, layout.num_kv_heads, layout.head_dim) == (0, 2, 64)
    assert layout.num_bytes(10) == NUM_LAYERS * 2 * 2 * 10 * 64 * 2


def test_worker_writes_exactly_the_bytes_reserved_by_the_service() -> None:
    from engine.kv_transfer.cache_layout import cache_layouts

    (layout,) = cache_layouts(config(), caches((NAMES, plain())))
    file = LayoutFactory("model", format_of([layout])).of([0] * 77, "v1")
    assert file.data_bytes == layout.num_bytes(77)


def window(size: int, **changes: Any) -> Any:
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    spec = SlidingWindowSpec(
        block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=size
    )
    return replace(spec, **changes)


def format_of(layouts: Any) -> KvFormat:
    from engine.kv_transfer.worker.export_setup import layer_formats

    return KvFormat.of_layers(layer_formats(layouts), dtype="bfloat16", rope={})


@pytest.mark.parametrize("num_tokens", [1, 32, 39, 40, 71, 72, 500])
def test_regions_of_layers_are_where_the_service_expects_them(num_tokens: int) -> None:
    """The first and the last layer share a block table; the other has larger heads."""
    from engine.kv_transfer.cache_layout import cache_layouts, split_slot

    of_group = caches(
        (NAMES[::2], window(40)),
        (NAMES[1:2], plain(num_kv_heads=1, head_size=128, head_size_v=128)),
    )
    layouts = cache_layouts(config(), of_group)
    assert [layout.layers for layout in layouts] == [(NAMES[0], NAMES[2]), (NAMES[1],)]
    file = LayoutFactory("model", format_of(layouts)).of([0] * num_tokens, "v1")
    slot = ExportSlot(arena=Path("arena"), offset=64, status_offset=0, num_tokens=num_tokens)
    parts = list(split_slot(layouts, slot))
    starts = {tensor.name: 64 + tensor.start for tensor in file.tensors()}
    assert [part.offset for part in parts] == [starts["k.0"], starts["k.1"]]
    assert [part.num_tokens for part in parts] == [file.shape(0)[1], file.shape(1)[1]]
    ends = [
        part.offset + layout.num_bytes(part.num_tokens)
        for part, layout in zip(parts, layouts, strict=True)
    ]
    assert ends == [parts[1].offset, 64 + file.data_bytes]
    # A response's first query is at num_tokens, and reads the 39 tokens before it.
    assert file.shape(0)[1] >= min(num_tokens, 39)
    assert (num_tokens - file.shape(0)[1]) % 32 == 0


def test_window_of_a_cache_that_keeps_all_tokens_is_ignored() -> None:
    """vLLM keeps them, and merges the specs, if its hybrid KV cache manager is disabled."""
    from engine.kv_transfer.cache_layout import cache_layouts

    (layout,) = cache_layouts(config(), caches((NAMES, plain(sliding_window=64))))
    assert layout.window is None


def test_heads_that_ranks_may_divide_differently_are_refused() -> None:
    from engine.kv_transfer.cache_layout import UnsupportedCache, cache_layouts

    with pytest.raises(UnsupportedCache, match="2 KV heads on a rank"):
        cache_layouts(config(tensor=2), caches((NAMES, plain())))
    mixed = caches((NAMES[:2], plain(num_kv_heads=1)), (NAMES[2:], plain()))
    with pytest.raises(UnsupportedCache, match="on several ranks"):
        cache_layouts(config(tensor=2), mixed)


def test_window_of_one_token_is_refused() -> None:
    from engine.kv_transfer.cache_layout import UnsupportedCache, cache_layouts

    with pytest.raises(UnsupportedCache, match="a window of 1 tokens"):
        cache_layouts(config(), caches((NAMES, window(1))))


def test_regions_that_would_not_be_aligned_are_refused() -> None:
    from engine.kv_transfer.cache_layout import UnsupportedCache, cache_layouts

    mixed = caches(
        (NAMES[:2], window(64, head_size=24, head_size_v=24)),
        (NAMES[2:], plain(head_size=24, head_size_v=24)),
    )
    with pytest.raises(UnsupportedCache, match="heads of size 24"):
        cache_layouts(config(), mixed)


def test_layers_of_a_draft_model_are_excluded() -> None:
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    from engine.kv_transfer.cache_layout import cache_layouts

    drafts = [f"draft_model.{name}" for name in NAMES[:1]]
    beside = caches((drafts, plain(head_size=32)), (NAMES, plain()))
    assert [layout.group for layout in cache_layouts(config(), beside)] == [1]
    specs = dict.fromkeys(NAMES, plain()) | dict.fromkeys(drafts, plain(num_kv_heads=4))
    uniform = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=specs)
    (layout,) = cache_layouts(config(), caches(([*drafts, *NAMES], uniform)))
    assert layout.layers == tuple(NAMES)
    beyond = [*NAMES, f"model.layers.{NUM_LAYERS}.self_attn.attn"]
    (layout,) = cache_layouts(config(), caches((beyond, plain())))
    assert layout.layers == tuple(NAMES)


def test_heads_are_divided_among_ranks_and_replicas_write_none() -> None:
    from engine.kv_transfer.cache_layout import cache_layouts

    (two,) = cache_layouts(config(tensor=2), caches((NAMES, plain(num_kv_heads=1))))
    assert [list(two.heads_to_write(rank)) for rank in range(2)] == [[0], [1]]
    (four,) = cache_layouts(config(tensor=4), caches((NAMES, plain(num_kv_heads=1))))
    assert [list(four.heads_to_write(rank)) for rank in range(4)] == [[0], [], [1], []]


@pytest.mark.parametrize("name", ["pipeline", "decode_context", "prefill_context"])
def test_layers_or_tokens_on_other_ranks_are_refused(name: str) -> None:
    from engine.kv_transfer.cache_layout import UnsupportedCache, cache_layouts

    with pytest.raises(UnsupportedCache, match=name.replace("_", " ")):
        cache_layouts(config(**{name: 2}), caches((NAMES, plain())))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention_chunk_size": 128}, "chunked"),
        ({"non_causal": True}, "non-causal"),
        ({"dtype": torch.float8_e4m3fn}, "float8"),
        ({"dtype": torch.uint8}, "uint8"),
        ({"head_size_v": 32}, "different sizes"),
        ({"page_size_padded": 2**20}, "page layout"),
        ({"state_content_bytes": 99}, "page layout"),
    ],
)
def test_cache_with_more_than_keys_and_values_is_refused(
    changes: dict[str, Any], reason: str
) -> None:
    from engine.kv_transfer.cache_layout import UnsupportedCache, cache_layouts

    with pytest.raises(UnsupportedCache, match=reason):
        cache_layouts(config(), caches((NAMES, plain(**changes))))


def test_special_attention_is_refused_by_its_name() -> None:
    from vllm.v1 import kv_cache_interface as known

    from engine.kv_transfer.cache_layout import UnsupportedCache, cache_layouts

    common = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    for spec in (
        known.MLAAttentionSpec(**common),
        known.ChunkedLocalAttentionSpec(**common, attention_chunk_size=128),
        known.SinkFullAttentionSpec(**common, sink_len=4),
    ):
        with pytest.raises(UnsupportedCache, match=type(spec).__name__):
            cache_layouts(config(), caches((NAMES, spec)))


def test_missing_and_doubled_layers_are_refused() -> None:
    from engine.kv_transfer.cache_layout import UnsupportedCache, cache_layouts

    with pytest.raises(UnsupportedCache, match="2 of 3"):
        cache_layouts(config(), caches((NAMES[:2], plain())))
    with pytest.raises(UnsupportedCache, match="two caches"):
        cache_layouts(config(), caches(([*NAMES, f"vision.{NAMES[0]}"], plain())))

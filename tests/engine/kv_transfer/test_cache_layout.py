"""Cache layouts that can be exported: plain attention over one block table."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.kv_types import KvFormat
from service.prompt_kv.layout import LayoutFactory

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
    from engine.kv_transfer.cache_layout import cache_layout

    layout = cache_layout(config(), caches((NAMES[::-1], plain())))
    assert layout.layers == tuple(NAMES)
    assert (layout.group, layout.num_kv_heads, layout.head_dim) == (0, 2, 64)
    assert layout.num_bytes(10) == NUM_LAYERS * 2 * 2 * 10 * 64 * 2


def test_worker_writes_exactly_the_bytes_reserved_by_the_service() -> None:
    from engine.kv_transfer.cache_layout import cache_layout

    layout = cache_layout(config(), caches((NAMES, plain())))
    kv_format = KvFormat(
        num_layers=len(layout.layers),
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        dtype="bfloat16",
        rope={},
    )
    assert LayoutFactory("model", kv_format).of([0] * 77, "v1").data_bytes == layout.num_bytes(77)


def test_layers_of_a_draft_model_are_excluded() -> None:
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    from engine.kv_transfer.cache_layout import cache_layout

    drafts = [f"draft_model.{name}" for name in NAMES[:1]]
    beside = caches((drafts, plain(head_size=32)), (NAMES, plain()))
    assert cache_layout(config(), beside).group == 1
    specs = dict.fromkeys(NAMES, plain()) | dict.fromkeys(drafts, plain(num_kv_heads=4))
    uniform = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=specs)
    layout = cache_layout(config(), caches(([*drafts, *NAMES], uniform)))
    assert layout.layers == tuple(NAMES)
    beyond = [*NAMES, f"model.layers.{NUM_LAYERS}.self_attn.attn"]
    assert cache_layout(config(), caches((beyond, plain()))).layers == tuple(NAMES)


def test_heads_are_divided_among_ranks_and_replicas_write_none() -> None:
    from engine.kv_transfer.cache_layout import cache_layout

    two = cache_layout(config(tensor=2), caches((NAMES, plain(num_kv_heads=1))))
    assert [list(two.heads_to_write(rank)) for rank in range(2)] == [[0], [1]]
    four = cache_layout(config(tensor=4), caches((NAMES, plain(num_kv_heads=1))))
    assert [list(four.heads_to_write(rank)) for rank in range(4)] == [[0], [], [1], []]


@pytest.mark.parametrize("name", ["pipeline", "decode_context", "prefill_context"])
def test_layers_or_tokens_on_other_ranks_are_refused(name: str) -> None:
    from engine.kv_transfer.cache_layout import UnsupportedCache, cache_layout

    with pytest.raises(UnsupportedCache, match=name.replace("_", " ")):
        cache_layout(config(**{name: 2}), caches((NAMES, plain())))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sliding_window": 128}, "window"),
        ({"attention_chunk_size": 128}, "window"),
        ({"non_causal": True}, "non-causal"),
        ({"dtype": torch.float8_e4m3fn}, "float8"),
        ({"dtype": torch.uint8}, "uint8"),
        ({"head_size_v": 32}, "different sizes"),
        ({"page_size_padded": 2**20}, "page layout"),
        ({"state_content_bytes": 99}, "page layout"),
        ({"num_kv_heads": 1}, "1 KV heads"),
    ],
)
def test_cache_with_more_than_keys_and_values_is_refused(
    changes: dict[str, Any], reason: str
) -> None:
    from engine.kv_transfer.cache_layout import UnsupportedCache, cache_layout

    with pytest.raises(UnsupportedCache, match=reason):
        cache_layout(config(), caches((NAMES, plain(**changes))))


def test_special_attention_is_refused_by_its_name() -> None:
    from vllm.v1 import kv_cache_interface as known

    from engine.kv_transfer.cache_layout import UnsupportedCache, cache_layout

    common = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    for spec in (
        known.MLAAttentionSpec(**common),
        known.SlidingWindowSpec(**common, sliding_window=128),
        known.ChunkedLocalAttentionSpec(**common, attention_chunk_size=128),
        known.SinkFullAttentionSpec(**common, sink_len=4),
    ):
        with pytest.raises(UnsupportedCache, match=type(spec).__name__):
            cache_layout(config(), caches((NAMES, spec)))


def test_mixed_or_missing_layers_are_refused() -> None:
    from engine.kv_transfer.cache_layout import UnsupportedCache, cache_layout

    with pytest.raises(UnsupportedCache, match="several KV cache groups"):
        cache_layout(config(), caches((NAMES[:1], plain()), (NAMES[1:], plain())))
    with pytest.raises(UnsupportedCache, match="2 of 3"):
        cache_layout(config(), caches((NAMES[:2], plain())))
    with pytest.raises(UnsupportedCache, match="two caches"):
        cache_layout(config(), caches(([*NAMES, f"vision.{NAMES[0]}"], plain())))

"""Files of prompt KV whose layers have different shapes and windows, as the client reads them."""

import json
from typing import Any

import pytest

from coppice.errors import BadAnswer
from coppice.prompt_kv.file_layout import layout_of
from coppice.wire.prompt_kv import KvHandle
from engine.types.kv import KvFormat, LayerFormat
from service.kv.handles.file_layout import Layout, LayoutFactory, layer_shapes

WINDOWED = LayerFormat(num_kv_heads=2, head_dim=32, window=20, block_size=16, region=0)
FULL = LayerFormat(num_kv_heads=1, head_dim=64, region=1)
FORMAT = KvFormat.of_layers([WINDOWED, FULL, WINDOWED], dtype="bfloat16", rope={})
FACTORY = LayoutFactory("model", FORMAT)


def header(layout: Layout) -> bytes:
    return layout.header({tensor.name: "0" * 16 for tensor in layout.tensors()})


def handle(layout: Layout, **changes: Any) -> KvHandle:
    known = {"num_tokens": layout.num_tokens, "num_bytes": layout.file_bytes, "version": "v1"}
    return KvHandle(handle="h", lease_seconds=1, locators=[], **(known | changes))


@pytest.mark.parametrize("num_tokens", [1, 19, 20, 34, 35, 36, 1000])
def test_client_finds_each_layer_at_its_place(num_tokens: int) -> None:
    layout = FACTORY.of([0] * num_tokens, "v1")
    read = layout_of(header(layout), handle(layout))
    assert [part.name for part in read.parts] == ["k.0", "v.0", "k.2", "v.2", "k.1", "v.1"]
    stored = num_tokens - max(0, num_tokens - 19) // 16 * 16
    assert [read.layer(index)[1].shape for index in range(3)] == [
        (2, stored, 32),
        (1, num_tokens, 64),
        (2, stored, 32),
    ]
    assert read.layer(1)[0].start == layout.header_bytes + 4 * 2 * stored * 32 * 2
    shapes = layer_shapes(layout)
    assert shapes is not None
    assert [shape.first_token for shape in shapes] == [num_tokens - stored, 0, num_tokens - stored]


def test_layers_of_one_shape_are_not_listed() -> None:
    plain = KvFormat.of_layers([FULL, FULL], dtype="bfloat16", rope={})
    assert plain == KvFormat(num_layers=2, num_kv_heads=1, head_dim=64, dtype="bfloat16", rope={})
    assert layer_shapes(LayoutFactory("model", plain).of([0] * 9, "v1")) is None


def test_header_has_the_same_length_for_every_prompt() -> None:
    lengths = {len(header(FACTORY.of([0] * number, "v1"))) for number in range(1, 200)}
    assert lengths == {FACTORY.of([0], "v1").header_bytes}


@pytest.mark.parametrize(
    "change",
    [
        {"k.1": {"shape": [1, 1001, 64]}},
        {"k.1": {"dtype": "F32"}},
        {"v.2": {"shape": [1, 36, 64]}},
        {"v.0": {"data_offsets": [0, 4]}},
        {"k.0": {"data_offsets": [4, 8]}},
    ],
)
def test_tensors_that_overlap_or_differ_are_refused(change: dict[str, Any]) -> None:
    layout = FACTORY.of([0] * 1000, "v1")
    entries = json.loads(header(layout)[8:])
    for name, fields in change.items():
        entries[name] |= fields
    text = json.dumps(entries, separators=(",", ":")).encode()
    changed = header(layout)[:8] + text.ljust(layout.header_bytes - 8)
    with pytest.raises(BadAnswer):
        layout_of(changed, handle(layout))


def test_file_of_another_length_or_number_of_tokens_is_refused() -> None:
    layout = FACTORY.of([0] * 100, "v1")
    for changes in ({"num_tokens": 99}, {"num_bytes": layout.file_bytes + 1}):
        with pytest.raises(BadAnswer, match="size of its handle"):
            layout_of(header(layout), handle(layout, **changes))

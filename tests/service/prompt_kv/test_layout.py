"""The size table in docs/operate/deploy.md against the arena's real sizes."""

import re
from pathlib import Path

import pytest

from engine.kv_types import KvFormat
from service.prompt_kv.layout import LayoutFactory

OPERATION = Path(__file__).parents[3] / "docs" / "operate" / "deploy.md"
ROW = re.compile(
    r"^\| (?P<models>[^|]+) \| (?P<layers>\d+) x (?P<heads>\d+) x (?P<dim>\d+) "
    r"\| (?P<token>\d+) \| (?P<samples>\d+) GiB \| (?P<prompt>[\d.]+ MiB|none) "
    r"\| (?P<arena>[\d,]+|none) \|$",
    re.MULTILINE,
)
ROWS = list(ROW.finditer(OPERATION.read_text()))


def test_table_lists_the_usual_models() -> None:
    named = "".join(row["models"] for row in ROWS)
    for model in ("Qwen3-0.6B", "1.7B", "Qwen3-4B", "Qwen3-32B", "Llama-3.1-8B", "70B", "gpt-oss"):
        assert model in named


@pytest.mark.parametrize("row", ROWS, ids=[row["models"] for row in ROWS])
def test_table_sizes_match_the_layout(row: re.Match[str]) -> None:
    form = KvFormat(
        num_layers=int(row["layers"]),
        num_kv_heads=int(row["heads"]),
        head_dim=int(row["dim"]),
        dtype="bfloat16",
        rope={"rope_type": "default", "rope_theta": 1e6},
    )
    layout = LayoutFactory("an/organisation's-model", form).of([0] * 999, "v1")
    token_bytes = layout.data_bytes // layout.num_tokens
    assert int(row["token"]) == token_bytes // 1024
    assert int(row["samples"]) == round(1000 * 512 * token_bytes / 2**30)
    if row["models"].startswith("gpt-oss"):
        assert (row["prompt"], row["arena"]) == ("none", "none"), "windows are not exported"
        return
    assert row["prompt"] == f"{layout.slot_bytes / 2**20:.0f} MiB"
    assert row["arena"] == f"{16 * 2**30 // layout.slot_bytes:,}"

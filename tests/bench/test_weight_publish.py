"""Weights that the benchmark of publications sends, and the rows that it makes of its figures."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.harness.publications import (
    BASE64,
    DELAYED,
    MAX_BASE64_BYTES,
    RUNNING,
    STREAMS,
    VLLM,
    Publication,
    VllmPublisher,
)
from bench.weight_publish import (
    CHANGED_SHARE,
    _as_dict,
    adapter_rows,
    measure,
    rows,
    running_rows,
    step,
)

ARMS = ["HTTP", "HTTP, delta", "shared directory"]
SLOW_HTTP = Publication(upload=1.8, activate=0.9, paused=0.7, load=0.5, first_token=0.3)
FAST = Publication(upload=0.2, activate=0.6, paused=0.55, load=0.5, first_token=0.1)


def figures() -> dict[str, object]:
    publications = dict.fromkeys(ARMS, FAST) | {"HTTP": SLOW_HTTP}
    return {
        "num_bytes": 4_000_000,
        "arms": {arm: [_as_dict(each)] * 3 for arm, each in publications.items()},
        "limits": {"copy": [0.1, 0.2, 0.9], "socket": [1.0, 1.0, 9.0]},
        "running": {arm: [_as_dict(FAST)] * 3 for arm in RUNNING},
        "adapters": {"adapter, HTTP": [{"load": 0.2, "first_token": 0.1}] * 3},
    }


def test_rows_have_medians_and_goals() -> None:
    found = {row.what.removeprefix("2M, 4 MB: "): row for row in rows("2m", figures())}
    assert list(found)[:5] == [*ARMS, "memory copy", "bare socket"]
    assert found["HTTP"].value.startswith("3.000 s: upload 1.800, paused 0.700 (load 0.500)")
    assert found["memory copy"].value == "0.200 s"
    goals = {what: (row.value, row.verdict) for what, row in list(found.items())[5:]}
    assert goals == {
        "HTTP / (bare socket + load)": ("1.80", "not met"),
        "HTTP, pause / load": ("1.40", "not met"),
    }


def test_pauses_with_samples_are_compared_with_those_without() -> None:
    found = [row.value for row in running_rows("2m", figures()) if "pause /" in row.what]
    assert found == ["0.79"] * len(RUNNING)


def test_adapters_have_the_time_of_the_load_and_of_the_first_token() -> None:
    [row] = adapter_rows("2m", figures())
    assert row.value == "0.300 s: load 0.200, first token 0.100"


def test_step_moves_a_share_of_the_values_by_one_unit() -> None:
    state = {"a": torch.ones(100, 200, dtype=torch.bfloat16)}
    moved = step(state, 1)["a"]
    changed = moved != state["a"]
    assert changed.float().mean().item() == pytest.approx(CHANGED_SHARE, rel=0.2)
    assert (moved[changed] == 1 + 2**-7).all()


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.parametrize(
    ("num_bytes", "arms"),
    [(MAX_BASE64_BYTES, {VLLM, BASE64}), (MAX_BASE64_BYTES + 1, {VLLM})],
)
def test_large_weights_are_not_sent_in_base64(
    tmp_path: Path, num_bytes: int, arms: set[str]
) -> None:
    with closing(VllmPublisher("http://127.0.0.1", tmp_path, num_bytes)) as publisher:
        assert publisher.arms.keys() == arms


@pytest.mark.exhaustive
async def test_every_arm_is_measured_on_a_small_model(tmp_path: Path) -> None:
    found: dict[str, Any] = await measure("2m", 1, tmp_path)
    over_streams = {f"{arm}, {STREAMS} streams" for arm in ("HTTP", DELAYED)}
    assert found["arms"].keys() == {*ARMS, DELAYED, *over_streams, VLLM, BASE64}
    assert found["running"].keys() == RUNNING.keys()
    for [publication] in (found["arms"] | found["running"]).values():
        assert 0 < publication["load"] <= publication["paused"] <= publication["activate"]
        parts = publication["upload"] + publication["activate"] + publication["first_token"]
        assert publication["total"] == pytest.approx(parts)
    for [adapter] in found["adapters"].values():
        assert adapter["load"] > 0 and adapter["first_token"] > 0
    made = [*rows("2m", found), *running_rows("2m", found), *adapter_rows("2m", found)]
    assert all(row.what.startswith(f"2M, {found['num_bytes'] / 1e6:,.0f} MB: ") for row in made)
    assert not (tmp_path / "2m").exists(), "the model is deleted"

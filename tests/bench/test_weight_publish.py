"""Weights that the benchmark of publications sends, and the rows that it makes of its figures."""

import pytest
import torch

from bench.harness.publications import RUNNING, Publication
from bench.weight_publish import CHANGED_SHARE, _as_dict, rows, step

ARMS = ["same host", "HTTP", "HTTP, delta", "shared directory"]
SLOW_HTTP = Publication(upload=1.8, activate=0.9, paused=0.7, load=0.5, first_token=0.3)
FAST = Publication(upload=0.2, activate=0.6, paused=0.55, load=0.5, first_token=0.1)


def figures() -> dict[str, object]:
    publications = dict.fromkeys([*ARMS, *RUNNING], FAST) | {"HTTP": SLOW_HTTP}
    arms = {arm: [_as_dict(each)] * 3 for arm, each in publications.items()}
    limits = {"copy": [0.1, 0.2, 0.9], "socket": [1.0, 1.0, 9.0]}
    adapters = {"adapter, HTTP": [{"load": 0.2, "first_token": 0.1}] * 3}
    return {"num_bytes": 4_000_000, "arms": arms, "limits": limits, "adapters": adapters}


def test_rows_have_medians_and_goals() -> None:
    found = {row.what.removeprefix("2M, 4 MB: "): row for row in rows("2m", figures())}
    expected = [*ARMS, *RUNNING, "memory copy", "bare socket", "adapter, HTTP"]
    assert list(found)[: len(expected)] == expected
    assert found["HTTP"].value.startswith("3.000 s: upload 1.800, paused 0.700 (load 0.500)")
    assert found["memory copy"].value == "0.200 s"
    assert found["adapter, HTTP"].value == "0.300 s: load 0.200, first token 0.100"
    for arm in RUNNING:
        assert found[f"{arm}, pause / without samples"].value == "1.00"
    goals = {what: (row.value, row.verdict) for what, row in found.items() if row.verdict}
    assert goals == {
        "same host / (two copies + load)": ("0.89", "met"),
        "same host, pause / load": ("1.10", "met"),
        "HTTP / (bare socket + load)": ("1.80", "not met"),
        "HTTP, pause / load": ("1.40", "not met"),
    }


def test_step_moves_a_share_of_the_values_by_one_unit() -> None:
    state = {"a": torch.ones(100, 200, dtype=torch.bfloat16)}
    moved = step(state, 1)["a"]
    changed = moved != state["a"]
    assert changed.float().mean().item() == pytest.approx(CHANGED_SHARE, rel=0.2)
    assert (moved[changed] == 1 + 2**-7).all()

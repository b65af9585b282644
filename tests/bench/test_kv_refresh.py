"""Partial recomputation of KV in reference models, and the choice of positions."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.kv_refresh import (
    METHODS,
    PERIODS,
    Context,
    Measured,
    last_part,
    oldest_part,
    record_of,
    run,
    whole_context,
)
from tests.engine.random_models import make_models

TOKENS = [(7 * i) % 400 + 5 for i in range(24)]
NEW = [11, 12, 13]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    paths: dict[str, Path] = make_models(tmp_path_factory.mktemp("models"), tied=True)
    return {
        version: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for version, path in paths.items()
    }


def exact(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([TOKENS + NEW]), use_cache=False).logits[0]
    return logits[len(TOKENS) :]


def over_kv(models: dict[str, Any], *windows: tuple[int, int]) -> torch.Tensor:
    """Logits under new weights, over KV of older ones of which windows are computed again."""
    context = Context()
    with torch.inference_mode():
        context.compute(models["v7"], TOKENS, 0)
        for first, end in windows:
            context.compute(models["v8"], TOKENS[first:end], first)
            assert context.length == len(TOKENS)
        return context.compute(models["v8"], NEW, len(TOKENS))


def test_kv_that_is_computed_again_from_first_to_last_is_exact(models: dict[str, Any]) -> None:
    logits = over_kv(models, (0, 10), (10, len(TOKENS)))
    torch.testing.assert_close(logits, exact(models["v8"]), atol=1e-4, rtol=1e-4)


def test_kv_behind_a_part_that_is_computed_again_stays_old(models: dict[str, Any]) -> None:
    for windows in ([], [(0, 10)], [(10, len(TOKENS))]):
        assert (over_kv(models, *windows) - exact(models["v8"])).abs().max() > 1e-3


def windows_of(computed_in: list[int], period: int) -> list[tuple[int, int]]:
    return oldest_part(period)(0, computed_in)


def test_oldest_positions_are_chosen_in_windows() -> None:
    assert windows_of([0, 0, 0, 0, 0, 0], 3) == [(0, 2)]
    assert windows_of([2, 2, 0, 0, 1, 1], 3) == [(2, 4)]
    assert windows_of([2, 0, 1, 3, 0, 1, 1, 0], 2) == [(1, 3), (4, 5), (7, 8)]
    assert windows_of([0, 0], 3) == []


@pytest.mark.parametrize("period", [2, 3, 5])
def test_no_position_of_a_growing_context_is_older_than_one_computed_again(period: int) -> None:
    computed_in, oldest = [0] * 70, list[int]()
    for update in range(1, 40):
        windows = oldest_part(period)(update, computed_in)
        chosen = {position for window in windows for position in range(*window)}
        assert len(chosen) == len(computed_in) // period
        left = [number for i, number in enumerate(computed_in) if i not in chosen]
        assert max(computed_in[i] for i in chosen) <= min(left)
        for position in chosen:
            computed_in[position] = update
        oldest.append(update - min(computed_in))
        computed_in += [update] * 70
    assert max(oldest) <= period - 1


def test_other_methods_choose_the_whole_context_or_its_end() -> None:
    assert last_part(4)(1, [0] * 100) == [(75, 100)]
    assert [whole_context(2)(update, [0] * 100) for update in (1, 2)] == [[(0, 0)], [(0, 100)]]


def test_update_that_computed_each_position_is_recorded(models: dict[str, Any]) -> None:
    context = Context()
    with torch.inference_mode():
        context.compute(models["v7"], TOKENS, 0)
        context.compute(models["v8"], TOKENS[3:5], 3, update=1)
        context.compute(models["v8"], NEW, len(TOKENS), update=2)
    assert context.computed_in == [0] * 3 + [1] * 2 + [0] * (len(TOKENS) - 5) + [2] * len(NEW)


def test_exact_kv_does_not_diverge(models: dict[str, Any]) -> None:
    same = {"v7": models["v7"], "again": models["v7"]}
    with torch.inference_mode():
        measured, num_tokens = run(same, 0, [TOKENS, NEW])
    assert num_tokens > len(TOKENS)
    assert all(abs(kl) < 1e-6 for each in measured.values() for kl in each.kl)
    assert measured["nothing"].num_computed_again == 0
    assert measured["last part, 1/2 per update"].num_computed_again == num_tokens - num_tokens // 2


def measurements(kl: Mapping[str, float]) -> dict[str, Measured]:
    """Measurements of a conversation, with other divergences where they are stated."""
    return {
        name: Measured([kl.get(name, 0.1), kl.get(name, 0.1)], 10)
        for name in ["nothing", *(f"{m}, 1/{p} per update" for m in METHODS for p in PERIODS)]
    }


def test_methods_are_compared_within_each_conversation() -> None:
    whole, oldest = "whole context, 1/3 per update", "oldest part, 1/3 per update"
    kl = [(0.1, 0.09), (0.5, 0.49), (0.9, 0.89)]
    results = [(measurements({whole: a, oldest: b}), 100) for a, b in kl]
    record = record_of(results, 2)
    assert record.raw["nothing"]["share"] == pytest.approx(0.1)
    met = [row for row in record.rows if row.verdict == "met"]
    assert [row.what for row in met] == ["oldest part / whole context, 1/3 per update"]
    assert "0.98 times as large, difference -1.0e-02 +- " in met[0].value
    assert sum(row.verdict == "missed" for row in record.rows) == 2

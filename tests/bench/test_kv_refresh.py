"""Partial recomputation of KV in reference models, and the choice of positions."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.kv_refresh import (
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


def test_all_parts_of_a_context_are_computed_again_in_turn() -> None:
    windows = sorted(oldest_part(3)(update, 100) for update in range(4, 7))
    assert windows == [(0, 33), (33, 66), (66, 100)]
    assert last_part(4)(1, 100) == (75, 100)
    assert [whole_context(2)(update, 100) for update in (1, 2)] == [(0, 0), (0, 100)]


def test_exact_kv_does_not_diverge(models: dict[str, Any]) -> None:
    same = {"v7": models["v7"], "again": models["v7"]}
    with torch.inference_mode():
        measured, num_tokens = run(same, 0, [TOKENS, NEW])
    assert num_tokens > len(TOKENS)
    assert all(abs(kl) < 1e-6 for each in measured.values() for kl in each.kl)
    assert measured["nothing"].num_computed_again == 0
    assert measured["last part, 1/2 per update"].num_computed_again == num_tokens - num_tokens // 2


def test_methods_are_compared_with_whole_contexts() -> None:
    names = ["nothing"]
    names += [
        f"{m}, 1/{p} per update"
        for m in ("whole context", "oldest part", "last part")
        for p in (2, 3, 5)
    ]
    results = [
        ({name: Measured([0.1 * (i + 1), 0.1], 10) for i, name in enumerate(names)}, 100)
        for _ in range(3)
    ]
    record = record_of(results, 2)
    assert record.raw["nothing"]["share"] == pytest.approx(0.1)
    compared = [row.verdict for row in record.rows if row.goal]
    assert compared == ["met"] * 6

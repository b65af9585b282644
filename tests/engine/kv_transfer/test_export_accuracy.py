"""Exports equal Hugging Face's forward, for the documented models."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.arena import TestArena
from tests.engine.kv_transfer.export_models import (
    COMMITTED,
    Family,
    exported,
    exporting,
    kv_format,
    max_error,
    reference,
    reference_kv,
    save_model,
)
from tests.engine.seedling import MODEL as SEEDLING
from tests.engine.upstream_defects import SPECULATION

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

TOLERANCE = 1e-4
LONG = [(7 * i) % 500 for i in range(230)]
# Chunks are 64 tokens, blocks 32; the last prompt shares 160 tokens with the first as cache hits.
PROMPTS = [
    LONG,
    [9, 8],
    [11 + i % 5 for i in range(20)],
    [(3 * i) % 400 for i in range(64)],
    [(5 * i) % 400 for i in range(65)],
    [*LONG[:160], *range(300, 337)],
]


@pytest.mark.parametrize(
    ("family", "num_kv_heads"),
    [
        ("qwen3", 2),
        *(pytest.param("llama", num, marks=pytest.mark.exhaustive) for num in (2, 4)),
    ],
)
def test_exports_equal_hugging_face(family: Family, num_kv_heads: int, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", family, num_kv_heads=num_kv_heads)
    arena = TestArena(tmp_path / "arena", kv_format(num_kv_heads))
    slots = [arena.slot(len(prompt) - 1) for prompt in PROMPTS]
    engine = exporting(model)
    answers = [
        engine.finish(engine.submit(prompt, export=slot, max_tokens=2))[0]
        for prompt, slot in zip(PROMPTS, slots, strict=True)
    ]
    engine.close()
    truth = reference(model)
    for prompt, slot in zip(PROMPTS, slots, strict=True):
        assert arena.words(slot) == COMMITTED
        assert max_error(arena, slot, reference_kv(truth, prompt, len(prompt) - 1)) < TOLERANCE
    assert answers[-1].num_cached_tokens == 160
    arena.check()


def test_exports_equal_hugging_face_with_drafts_in_the_batch(tmp_path: Path) -> None:
    """Siblings decode with drafts while prompts are prefilled in chunks, two of them equal."""
    model = save_model(tmp_path / "model", "qwen3", num_kv_heads=4)
    arena = TestArena(tmp_path / "arena", kv_format(4))
    prompts = [[20 * i + j % 5 for j in range(70 + i)] for i in (1, 2, 3, 3)]
    slots = [arena.slot(len(prompt) - 1) for prompt in prompts]
    engine = exporting(model, **SPECULATION)
    names = []
    for prompt, slot in zip(prompts, slots, strict=True):
        names.append(engine.submit(prompt, export=slot, max_tokens=60, temperature=0.7))
        names.append(engine.submit(prompt, max_tokens=60, temperature=0.7))
        engine.step()
    answers = engine.finish(*names)
    engine.close()
    assert len(answers) == 8
    truth = reference(model)
    for prompt, slot in zip(prompts, slots, strict=True):
        assert arena.words(slot) == COMMITTED
        assert max_error(arena, slot, reference_kv(truth, prompt, len(prompt) - 1)) < TOLERANCE
    arena.check()


def test_bfloat16_exports_are_as_accurate_as_hugging_face(tmp_path: Path) -> None:
    """Both round on their way; docs/reference/models.md has the figures that this prints."""
    config = AutoConfig.from_pretrained(SEEDLING)
    layout = kv_format(
        config.num_key_value_heads,
        num_layers=config.num_hidden_layers,
        head_dim=config.head_dim,
        dtype="bfloat16",
    )
    arena, prompt = TestArena(tmp_path / "arena", layout), [5 + i % 200 for i in range(300)]
    slot = arena.slot(len(prompt) - 1)
    engine = exporting(SEEDLING, dtype="bfloat16")
    engine.finish(engine.submit(prompt, export=slot, max_tokens=2))
    engine.close()
    truth = reference_kv(reference(SEEDLING), prompt, len(prompt) - 1)
    rounded = reference_kv(reference(SEEDLING, torch.bfloat16), prompt, len(prompt) - 1)
    ours, theirs = exported(arena, slot).float() - truth, rounded - truth
    print(f"scale {truth.abs().max():.2f}")
    for name, error in {"exported": ours, "Hugging Face": theirs}.items():
        print(f"{name}: worst {error.abs().max():.2e}, mean {error.abs().mean():.2e}")
    assert ours.abs().mean() < 1.5 * theirs.abs().mean()


@pytest.fixture
def split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Any, TestArena]]:
    cpus = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cpus[0]}|{cpus[-1]}")
    model = save_model(tmp_path / "model", "qwen3", num_kv_heads=2)
    arena = TestArena(tmp_path / "arena", kv_format(2), num_ranks=2)
    engine = exporting(model, tensor_parallel_size=2)
    yield model, engine, arena
    engine.close()


@pytest.mark.exhaustive
def test_two_ranks_write_the_export_of_one(split: tuple[Path, Any, TestArena]) -> None:
    model, engine, arena = split
    slots = [arena.slot(len(prompt) - 1) for prompt in PROMPTS]
    names = [
        engine.submit(prompt, export=slot, max_tokens=2)
        for prompt, slot in zip(PROMPTS, slots, strict=True)
    ]
    engine.finish(*names)
    assert engine.rpc("coppice_flush_exports") == [True, True]
    truth = reference(model)
    for prompt, slot in zip(PROMPTS, slots, strict=True):
        assert arena.words(slot) == COMMITTED * 2
        assert max_error(arena, slot, reference_kv(truth, prompt, len(prompt) - 1)) < TOLERANCE
    arena.check()

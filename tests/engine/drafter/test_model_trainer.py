"""A drafter learns, and resumes where it stopped."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.drafter.trainer.messages import Sample, encode_top_k, top_k_of
from engine.drafter.trainer.model_trainer import ModelTrainer
from engine.drafter.trainer.packing import PackedBatch, pack
from engine.types.samples import TokenLogprob

SAMPLE = Sample(version="v", prompt=[3, 4, 5], response=[6, 7, 8, 9, 6, 7, 8, 9])


def packed() -> PackedBatch:
    return pack(itertools.repeat(SAMPLE).__next__, 22)


def test_training_text_becomes_likely(drafter_folder: Path) -> None:
    model_trainer = ModelTrainer(drafter_folder)
    before_schedule = model_trainer.compute_loss(packed()).item()
    for _ in range(60):
        model_trainer.step(packed())
    assert model_trainer.compute_loss(packed()).item() < before_schedule / 3
    assert model_trainer.num_tokens == 60 * 16


def test_all_tensors_change_and_are_saved(drafter_folder: Path, tmp_path: Path) -> None:
    model_trainer = ModelTrainer(drafter_folder)
    for _ in range(3):
        model_trainer.step(packed())
    model_trainer.write_drafter(tmp_path / "d.safetensors")
    model_trainer.save(tmp_path / "c.safetensors")
    first = load_file(drafter_folder / "model.safetensors")
    now = load_file(tmp_path / "d.safetensors")
    assert now.keys() == first.keys()
    changed = {name for name in now if (now[name] != first[name]).any()}
    kept = {name.removeprefix("value.") for name in load_file(tmp_path / "c.safetensors")}
    kept = {name for name in kept if not name.startswith(("step.", "exp_avg"))}
    assert changed == kept == set(first)


def test_resumed_training_equals_uninterrupted_training(
    drafter_folder: Path, tmp_path: Path
) -> None:
    one = ModelTrainer(drafter_folder)
    for _ in range(5):
        one.step(packed())
    one.save(tmp_path / "c.safetensors")
    other = ModelTrainer(drafter_folder)
    assert other.resume(tmp_path / "c.safetensors")
    assert (other.num_steps, other.num_tokens) == (5, one.num_tokens)
    assert (other.loss_tracker.num_steps, other.loss_tracker.smoothed) == (
        5,
        one.loss_tracker.smoothed,
    )
    for model_trainer in (one, other):
        model_trainer.step(packed())
    torch.testing.assert_close(one.compute_loss(packed()), other.compute_loss(packed()))


@pytest.mark.parametrize("content", [b"", b"half a file", None])
def test_missing_or_unreadable_checkpoint_is_not_resumed(
    drafter_folder: Path, tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "c.safetensors").write_bytes(content)
    assert not ModelTrainer(drafter_folder).resume(tmp_path / "c.safetensors")


def test_checkpoint_of_other_tensors_is_not_resumed(drafter_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "c.safetensors"
    ModelTrainer(drafter_folder).save(file)
    tensors = load_file(file)
    del tensors[next(name for name in tensors if name.startswith("value."))]
    with safe_open(file, "pt") as opened:
        save_file(tensors, file, metadata=opened.metadata())
    assert not ModelTrainer(drafter_folder).resume(tmp_path / "c.safetensors")


def test_training_continues_from_imported_weights(drafter_folder: Path, tmp_path: Path) -> None:
    one, other = (ModelTrainer(drafter_folder) for _ in range(2))
    for _ in range(40):
        one.step(packed())
    one.write_drafter(tmp_path / "d.safetensors")
    other.adopt(tmp_path / "d.safetensors")
    torch.testing.assert_close(one.compute_loss(packed()), other.compute_loss(packed()))


def test_recorded_top_k_is_learned_in_addition_to_the_sampled_token(drafter_folder: Path) -> None:
    """Every response begins with 6; the recorded top-k give 7 a probability of three quarters."""
    model_trainer = ModelTrainer(drafter_folder)
    often = [TokenLogprob(6, math.log(0.25), 2), TokenLogprob(7, math.log(0.75), 1)]
    sent = Sample(
        version="v", prompt=[3, 4, 5], response=[6], top_logprobs=encode_top_k(top_k_of([often]))
    )
    row = pack(lambda: sent, 32)
    for _ in range(100):
        model_trainer.step(row)
    model_trainer.write_drafter(drafter_folder / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(drafter_folder)
    said = model(torch.tensor([[3, 4, 5]])).logits[0, -1].detach().softmax(-1)
    assert said[7] == pytest.approx(0.75, abs=0.05)
    assert said[6] == pytest.approx(0.25, abs=0.05)

"""Several samples packed in one row, each attending only to itself."""

import itertools
from pathlib import Path

import pytest
import torch

from engine.drafter.trainer.messages import TOP_K, Sample, encode_top_k, top_k_of
from engine.drafter.trainer.packing import IGNORE_INDEX, pack
from engine.types.samples import TokenLogprob

SAMPLES = [
    Sample(version="v", prompt=[1, 2, 3], response=[4, 5]),
    Sample(version="v", prompt=[6], response=[7, 8, 9]),
]


def test_labels_are_the_next_response_tokens_and_nothing_else() -> None:
    packed = pack(iter(SAMPLES * 2).__next__, 9)
    assert packed.tokens_T.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    none = IGNORE_INDEX
    assert packed.labels_T.tolist() == [none, none, 4, 5, none, 7, 8, 9, none]
    assert packed.positions_T.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]


def test_tokens_attend_neither_to_other_samples_nor_to_later_tokens() -> None:
    mask = pack(iter(SAMPLES * 2).__next__, 9).mask_TT()
    for row, column in itertools.product(range(9), range(9)):
        assert bool(mask[row, column]) == (column <= row and (row < 5) == (column < 5))


@pytest.mark.parametrize(("prompt", "response"), [(30, 4), (3, 40), (30, 40)])
def test_sample_longer_than_a_row_is_truncated_at_both_ends(prompt: int, response: int) -> None:
    sample = Sample(
        version="v", prompt=list(range(prompt)), response=list(range(100, 100 + response))
    )
    packed = pack(lambda: sample, 16)
    assert len(packed.tokens_T) == 16
    kept = packed.labels_T[packed.labels_T != IGNORE_INDEX].tolist()
    assert kept == list(range(100, 100 + min(response, 15)))


def test_packed_sample_has_the_same_loss_as_alone(drafter_folder: Path) -> None:
    from engine.drafter.trainer.model_trainer import ModelTrainer

    model_trainer = ModelTrainer(drafter_folder)
    together = model_trainer.compute_loss(pack(iter(SAMPLES * 2).__next__, 9))
    alone = [model_trainer.compute_loss(pack(itertools.repeat(s, 2).__next__, 5)) for s in SAMPLES]
    torch.testing.assert_close(together * 5, alone[0] * 2 + alone[1] * 3)


def test_top_k_targets_are_at_the_position_that_predicts_the_token() -> None:
    """Only the second sample has them, and they are truncated with its response."""
    text = encode_top_k(top_k_of([[TokenLogprob(token, -1.0, 1)] for token in (7, 8, 9)]))
    acceptance = Sample(version="v", prompt=[6], response=[7, 8, 9], top_logprobs=text)
    assert pack(iter(SAMPLES * 2).__next__, 9).soft_targets is None
    packed = pack(iter([SAMPLES[0], acceptance, acceptance]).__next__, 9)
    assert packed.soft_targets is not None
    assert packed.labels_T[packed.soft_targets.positions_R].tolist() == [7, 8, 9]
    assert packed.soft_targets.tokens_RK.tolist() == [[token] * TOP_K for token in (7, 8, 9)]
    cut = pack(lambda: acceptance, 3).soft_targets
    assert cut is not None
    assert cut.tokens_RK[:, 0].tolist() == [7, 8]

"""The Triton kernel of token logprobs in the interpreter; run like interpreted_attention.py."""

import pytest
import torch

from kernels.token_logprobs import TILE_COLUMNS, TILE_ROWS, compute_token_logprobs

TILE = TILE_ROWS * TILE_COLUMNS
VOCABS = [7, TILE_COLUMNS, TILE, TILE + 1, 151_936]
"""Less than a column of tiles, a row of a tile, whole tiles, and the vocabulary of Qwen 3."""


def random_logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return 4 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def expected(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    return logits.double().log_softmax(-1).gather(-1, token_ids)


def assert_right(logits: torch.Tensor, token_ids: torch.Tensor) -> None:
    found = compute_token_logprobs(logits, token_ids)
    assert found.dtype == torch.float32
    torch.testing.assert_close(
        found.double(), expected(logits, token_ids), atol=2e-5, rtol=1e-6, equal_nan=True
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("vocab", VOCABS)
def test_logprobs_are_those_of_the_softmax(vocab: int, dtype: torch.dtype) -> None:
    logits = random_logits(3, vocab).to(dtype)
    assert_right(logits, torch.tensor([[0], [vocab // 2], [vocab - 1]]))


@pytest.mark.parametrize("num_ids", [2, 21, TILE_COLUMNS + 1])
def test_any_number_of_tokens(num_ids: int) -> None:
    logits = random_logits(2, TILE + 100)
    assert_right(logits, logits.topk(num_ids).indices)


def test_rows_of_a_padded_vocabulary() -> None:
    """Logits beyond the vocabulary are not part of the softmax."""
    padded = random_logits(3, TILE + 64)
    padded[:, TILE + 10 :] = 50.0
    assert_right(padded[:, : TILE + 10], torch.tensor([[1], [2], [TILE + 9]]))


def test_tokens_in_a_column_of_another_tensor() -> None:
    """vLLM's sampled tokens may be a view."""
    logits = random_logits(3, 500)
    assert_right(logits, torch.tensor([[3, 0], [4, 0], [5, 0]], dtype=torch.int32)[:, :1].long())


def test_excluded_tokens() -> None:
    """Minus infinity excludes a token: whole tiles, whole columns over tiles, and all but one."""
    logits = random_logits(4, 2 * TILE + 5)
    logits[0, :TILE] = logits[1, 3::TILE_COLUMNS] = -torch.inf
    logits[2, torch.arange(logits.shape[1]) != 9] = -torch.inf
    logits[3, 9:] = -torch.inf
    assert_right(logits, torch.tensor([[TILE + 1, 0], [3, 4], [9, 8], [9, 8]]))


def test_large_logits_do_not_overflow() -> None:
    logits = random_logits(2, TILE + 1)
    logits[0] += 3e4
    logits[1, TILE] = -1e30
    logits[1, 0] = 1e30
    assert_right(logits, torch.tensor([[0, TILE], [0, TILE]]))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_broken_rows_have_the_logprob_nan_and_others_do_not() -> None:
    logits = random_logits(5, TILE + 30)
    logits[0, TILE + 29] = logits[1, 0] = torch.nan
    logits[2] = -torch.inf
    logits[3, 7] = torch.inf
    found = compute_token_logprobs(logits, torch.full((5, 1), 2))
    assert found[:4].isnan().all()
    assert found[4].isfinite().all()

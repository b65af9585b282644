"""Encoded supports decode to the same sets, and take few bytes."""

import numpy as np
import pytest

from coppice.wire.columns.support import (
    GivenSupport,
    SupportAnswer,
    decode_ids,
    decode_mask,
    rows_of,
    support_answer,
)
from engine.sampling.support_encoding import ALL, encode_mask

VOCAB = 151_937


def mask_of(ids: list[int], vocab: int = VOCAB) -> np.ndarray:
    mask = np.zeros(vocab, bool)
    mask[ids] = True
    return mask


@pytest.mark.parametrize("vocab", [1, 7, 8, 9, 129, 16_385, VOCAB])
@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.2, 0.5, 0.9, 0.999, 1.0])
def test_a_set_is_decoded_as_encoded(vocab: int, share: float) -> None:
    mask = np.random.default_rng(vocab).random(vocab) < share
    row = encode_mask(mask)
    assert np.array_equal(decode_mask(row, vocab), mask)
    assert np.array_equal(decode_ids(row, vocab), np.flatnonzero(mask))
    assert len(row) <= 1 + (vocab + 7) // 8


@pytest.mark.parametrize("ids", [[0], [127], [128], [16_383, 16_384], [VOCAB - 1], [5, 6, 7]])
def test_distances_at_the_limits_of_a_varint(ids: list[int]) -> None:
    assert decode_ids(encode_mask(mask_of(ids)), VOCAB).tolist() == ids


def test_shortest_encoding_is_chosen() -> None:
    every = np.ones(VOCAB, bool)
    assert encode_mask(every) == ALL
    assert len(encode_mask(mask_of([10, 11, 12]))) == 4
    every[[3, 4]] = False
    assert len(encode_mask(every)) == 3
    half = np.arange(VOCAB) % 2 == 0
    assert len(encode_mask(half)) == 1 + (VOCAB + 7) // 8


def test_repeated_sets_are_stored_once() -> None:
    wide, narrow = encode_mask(mask_of(list(range(0, 900, 3)))), encode_mask(mask_of([7]))
    rows = [wide, narrow, wide, narrow, ALL, wide]
    answer = support_answer(rows, VOCAB)
    assert rows_of(answer) == rows
    assert sum(answer.lengths) == len(wide) + 2 * len(narrow) + 2 * 2 + 1


def test_references_reach_over_many_tokens() -> None:
    rows = [encode_mask(mask_of([n, n + 500])) for n in range(300)] * 2
    assert rows_of(support_answer(rows, VOCAB)) == rows


@pytest.mark.parametrize(
    ("lengths", "data"),
    [
        ([2], "AA=="),
        ([1], "BA=="),
        ([2], "BAA="),
        ([1], "CQ=="),
        ([2], "AAA="),
        ([1, 1], "AA=="),
        ([1], "!!!!"),
        ([2], "A/8="),
    ],
)
def test_inconsistent_rows_are_refused(lengths: list[int], data: str) -> None:
    given = GivenSupport(vocab_size=100, lengths=lengths, data=data)
    with pytest.raises(ValueError, match="support"):
        rows_of(given)


@pytest.mark.parametrize("row", [b"\x01\xff", b"\x01\x80\x80\x80\x80\x80\x01", b"\x02\x7f"])
def test_inconsistent_ids_are_refused(row: bytes) -> None:
    with pytest.raises(ValueError, match="support"):
        decode_ids(row, 100)


def test_no_tokens_have_no_rows() -> None:
    answer = support_answer([], VOCAB)
    assert answer == SupportAnswer(vocab_size=VOCAB, lengths=[], data="")
    assert rows_of(answer) == []

"""Entries of the draft history: round trips, limits, and everything that is refused."""

import struct
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.draft_history.entries import (
    HEADER,
    MAGIC,
    MAX_ENTRY_BYTES,
    MAX_RESPONSES_PER_PROMPT,
    FinishedText,
    MalformedEntry,
    decode,
    encode,
)

VOCABULARY = 50
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=5)


def text(prompt: Sequence[int], response: Sequence[int], sequence: int = 1) -> FinishedText:
    return FinishedText(sequence=sequence, prompt=prompt, response=response)


def decoded(data: bytes) -> list[tuple[int, list[int], list[int]]]:
    """Sequence number, prompt and response of each text."""
    entry = decode(data, VOCABULARY)
    return [
        (entry.sequence, prompt.tolist(), response.tolist())
        for prompt, responses in entry.texts
        for response in responses
    ]


def serialized(*lengths: int, tokens: Sequence[int], counts: tuple[int, int]) -> bytes:
    arrays = (np.array(lengths, "<u4").tobytes(), np.array(tokens, "<i4").tobytes())
    return HEADER.pack(MAGIC, 1, *counts) + b"".join(arrays)


@given(st.lists(st.tuples(st.integers(0, 2), TOKENS, TOKENS), max_size=20))
def test_all_texts_survive_a_round_trip(texts: list[tuple[int, list[int], list[int]]]) -> None:
    entries = encode(text(prompt, response, sequence) for sequence, prompt, response in texts)
    found = [one for entry in entries for one in decoded(entry.data)]
    assert sorted(found) == sorted(texts)
    assert sum(entry.num_responses for entry in entries) == len(texts)


def test_prompt_is_written_once_for_all_of_its_responses() -> None:
    prompt = list(range(40))
    [one] = encode([text(prompt, [1])])
    [both] = encode([text(prompt, [1]), text(prompt, [2, 3])])
    assert len(both.data) == len(one.data) + 3 * 4


def test_entries_are_bounded_in_bytes_and_responses() -> None:
    entries = encode(text([number % 3], [4] * 100) for number in range(2000))
    assert all(len(entry.data) <= MAX_ENTRY_BYTES for entry in entries)
    counts = [len(r) for entry in entries for _, r in decode(entry.data, VOCABULARY).texts]
    assert sum(counts) == 2000 and max(counts) <= MAX_RESPONSES_PER_PROMPT


def test_longest_text_fits_into_an_entry() -> None:
    longest = text([1], [2] * ((MAX_ENTRY_BYTES - HEADER.size) // 4 - 4))
    assert longest.num_bytes == MAX_ENTRY_BYTES
    [entry] = encode([longest])
    assert len(entry.data) == MAX_ENTRY_BYTES and len(decoded(entry.data)) == 1


VALID = serialized(1, 1, 2, tokens=(5, 6, 7), counts=(1, 1))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x" * 64,
        VALID[:-4],
        VALID[:-1],
        VALID + b"\0\0\0\0",
        VALID.replace(MAGIC, b"CDH0"),
        HEADER.pack(MAGIC, -1, 1, 1) + VALID[HEADER.size :],
        HEADER.pack(MAGIC, 1, 0, 0),
        HEADER.pack(MAGIC, 1, 2**32 - 1, 2**32 - 1),
        serialized(1, 0, 2, tokens=(5, 6, 7), counts=(1, 1)),
        serialized(1, 2, 2, tokens=(5, 6, 7), counts=(1, 1)),
        serialized(0, 1, 3, tokens=(5, 6, 7), counts=(1, 1)),
        serialized(2**32 - 1, 1, 2**31 + 4, tokens=(5, 6, 7), counts=(1, 1)),
        serialized(1, 2, 0, 2, tokens=(5, 6, 7), counts=(1, 2)),
        serialized(1, 1, 2, 0, 1, tokens=(5, 6, 7, 8), counts=(2, 1)),
        serialized(1, 1, 2, tokens=(5, 6, VOCABULARY), counts=(1, 1)),
        serialized(1, 1, 2, tokens=(5, -6, 7), counts=(1, 1)),
        serialized(1, 129, *[1] * 129, tokens=[5] * 130, counts=(1, 129)),
        VALID + bytes(MAX_ENTRY_BYTES),
    ],
)
def test_malformed_entries_are_refused(data: bytes) -> None:
    assert decoded(VALID) == [(1, [5], [6, 7])]
    with pytest.raises(MalformedEntry):
        decode(data, VOCABULARY)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedEntry):
        decode(data, VOCABULARY)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=30), st.integers(0, 9), st.integers(0, 9))
def test_random_lengths_are_refused_or_consistent(
    words: list[int], num_prompts: int, num_responses: int
) -> None:
    body = struct.pack(f"<{len(words)}I", *words)
    try:
        entry = decode(HEADER.pack(MAGIC, 1, num_prompts, num_responses) + body, VOCABULARY)
    except MalformedEntry:
        return
    assert len(entry.texts) == num_prompts
    assert sum(len(responses) for _, responses in entry.texts) == num_responses

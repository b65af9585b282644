"""What is kept of the likeliest tokens that a server records."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from engine.drafter.trainer.soft_targets import KEPT, as_text, from_text, recorded
from engine.io.vllm_types import Pending
from engine.protocol import Completion, Place, Ranked, SampleRequest, Sampling

CERTAIN: Place = [Ranked(5, 0.0, 1), Ranked(5, 0.0, 1)]
UNSURE: Place = [Ranked(9, math.log(0.1), 3), Ranked(4, math.log(0.6), 1), Ranked(2, -1.5, 2)]


def test_a_token_counts_once_and_the_likeliest_come_first() -> None:
    found = recorded([CERTAIN, UNSURE])
    assert found.tokens[0].tolist() == [5] * KEPT
    assert found.masses[0].tolist() == [1.0] + [0.0] * (KEPT - 1)
    assert found.tokens[1].tolist() == [4, 2, 9] + [4] * (KEPT - 3)
    assert found.masses[1, :3] == pytest.approx([0.6, math.exp(-1.5), 0.1])
    assert not found.masses[1, 3:].any()


def test_of_many_the_likeliest_are_kept() -> None:
    many = [Ranked(token, -0.1 * token - 2, token + 1) for token in range(50)]
    found = recorded([[many[40], *many]])
    assert found.tokens[0].tolist() == list(range(KEPT))


def test_what_travels_is_what_was_recorded() -> None:
    found = recorded([CERTAIN, UNSURE])
    for sent, come in zip(found, from_text(as_text(found)), strict=True):
        np.testing.assert_array_equal(sent, come)


@dataclass
class Flat:
    """vLLM's, of two places: the token itself and the two likeliest."""

    token_ids: list[int] = field(default_factory=lambda: [5, 5, 6, 7, 8, 7])
    logprobs: list[float] = field(default_factory=lambda: [-0.1, -0.1, -3.0, -2.0, -0.5, -2.0])
    ranks: list[int] = field(default_factory=lambda: [1, 1, 2, 2, 1, 2])
    start_indices: list[int] = field(default_factory=lambda: [0, 3])
    end_indices: list[int] = field(default_factory=lambda: [3, 6])


@dataclass
class Output:
    """vLLM's, of a sample that has ended."""

    token_ids: tuple[int, ...] = (5, 7)
    logprobs: Flat = field(default_factory=Flat)
    finish_reason: str = "stop"
    weight_versions: None = None
    num_cached_tokens: int = 0

    @property
    def outputs(self) -> "list[Output]":
        return [self]

    async def get(self) -> "Output":
        return self


@pytest.mark.parametrize(
    ("asked", "told", "answered"),
    [
        ({}, False, False),
        ({"num_likeliest": 2}, True, True),
        ({"entropy_over": 2}, True, False),
    ],
)
async def test_whoever_learns_is_told_of_them_wherever_they_were_recorded(
    asked: dict[str, Any], told: bool, answered: bool
) -> None:
    heard: list[Completion] = []
    request = SampleRequest(id="a", prompt_token_ids=[1], sampling=Sampling(max_tokens=2), **asked)
    completion = await Pending(Output(), request, heard.append)
    places = [
        [(5, -0.1, 1), (5, -0.1, 1), (6, -3.0, 2)],
        [(7, -2.0, 2), (8, -0.5, 1), (7, -2.0, 2)],
    ]
    assert heard[0].likeliest == (places if told else None)
    assert completion.likeliest == (places if answered else None)

"""Soft targets: the top-k tokens recorded with a sample."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from vllm.v1.outputs import LogprobsLists

from engine.drafter.trainer.messages import TOP_K, decode_top_k, encode_top_k, top_k_of
from engine.requests.logprob_arrays import LogprobChunks
from engine.requests.pending_sample import PendingSample
from engine.types.samples import Completion, SampleRequest, Sampling, TokenLogprob, TopLogprobs

CERTAIN: TopLogprobs = [TokenLogprob(5, 0.0, 1), TokenLogprob(5, 0.0, 1)]
UNSURE: TopLogprobs = [
    TokenLogprob(9, math.log(0.1), 3),
    TokenLogprob(4, math.log(0.6), 1),
    TokenLogprob(2, -1.5, 2),
]


def test_tokens_are_unique_and_sorted_by_probability() -> None:
    found = top_k_of([CERTAIN, UNSURE])
    assert found.tokens[0].tolist() == [5] * TOP_K
    assert found.probs[0].tolist() == [1.0] + [0.0] * (TOP_K - 1)
    assert found.tokens[1].tolist() == [4, 2, 9] + [4] * (TOP_K - 3)
    assert found.probs[1, :3] == pytest.approx([0.6, math.exp(-1.5), 0.1])
    assert not found.probs[1, 3:].any()


def test_only_the_top_k_are_stored() -> None:
    many = [TokenLogprob(token, -0.1 * token - 2, token + 1) for token in range(50)]
    found = top_k_of([[many[40], *many]])
    assert found.tokens[0].tolist() == list(range(TOP_K))


def test_serialization_is_lossless() -> None:
    found = top_k_of([CERTAIN, UNSURE])
    for sent, come in zip(found, decode_top_k(encode_top_k(found)), strict=True):
        np.testing.assert_array_equal(sent, come)


def recorded() -> LogprobChunks:
    """Logprobs of two positions: the sampled token and the top two."""
    found = LogprobChunks()
    logprobs = np.array([[-0.125, -0.125, -3.0], [-2.0, -0.5, -2.0]])
    ids = np.array([[5, 5, 6], [7, 8, 7]])
    found.append(LogprobsLists(ids, logprobs, np.array([1, 2])), 3)
    return found


@dataclass
class Output:
    """vLLM's output of a finished sample."""

    token_ids: tuple[int, ...] = (5, 7)
    logprobs: LogprobChunks | None = None
    finish_reason: str = "stop"
    stop_reason: None = None
    weight_versions: None = None
    routed_experts: None = None
    num_cached_tokens: int = 0
    finished: bool = True

    @property
    def outputs(self) -> "list[Output]":
        return [self]

    async def get(self) -> "Output":
        return self


@pytest.mark.parametrize(
    ("asked", "told", "answered"),
    [
        ({}, False, False),
        ({"num_top_logprobs": 2}, True, True),
        ({"entropy_top_k": 2}, True, False),
    ],
)
async def test_trainer_receives_top_k_wherever_they_were_recorded(
    asked: dict[str, Any], told: bool, answered: bool
) -> None:
    heard: list[Completion] = []
    request = SampleRequest(id="a", prompt_token_ids=[1], sampling=Sampling(max_tokens=2), **asked)
    output = Output(logprobs=recorded() if told else None)
    completion = await PendingSample(output, request, heard.append)
    places = [
        [(5, -0.125, 1), (5, -0.125, 1), (6, -3.0, 2)],
        [(7, -2.0, 2), (8, -0.5, 1), (7, -2.0, 2)],
    ]
    assert list(heard[0].top_logprobs or []) == (places if told else [])
    assert list(completion.top_logprobs or []) == (places if answered else [])

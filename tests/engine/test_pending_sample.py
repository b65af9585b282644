"""Samples whose constraints exclude all tokens at a position, as vLLM returns them."""

import asyncio
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.outputs import SamplingMaskLists

from engine.requests.logprob_arrays import LogprobChunks
from engine.requests.pending_sample import PendingSample, to_completion
from engine.requests.request_submission import Generation
from engine.types.samples import SampleRequest, Sampling, TokenDelta, VersionSpan

NAN = math.nan
SPAN = VersionSpan(version="v0", start=0, end=9)


def output(logprobs: Sequence[float], *, finished: bool) -> Any:
    """vLLM's output of a sample with the tokens 0, 1, 2 and so on."""
    chunks, length = LogprobChunks(), len(logprobs)
    chunks.append(np.arange(length)[:, None], np.array(logprobs)[:, None], np.ones(length))
    span = SimpleNamespace(version="v0", start=0, end=length)
    sample = SimpleNamespace(
        token_ids=list(range(length)),
        logprobs=chunks,
        finish_reason="length" if finished else None,
        stop_reason=None,
        weight_versions=[span],
        sampling_mask=None,
        routed_experts=np.zeros((3 + length, 1, 1)) if finished else None,
    )
    return SimpleNamespace(outputs=[sample], finished=finished, num_cached_tokens=0)


@pytest.mark.parametrize(
    ("logprobs", "num_tokens"),
    [([-1.0, -2.0, -3.0, -4.0], 4), ([-1.0, -2.0, NAN, -4.0], 2), ([NAN, -2.0, -3.0, NAN], 0)],
)
async def test_sample_ends_before_a_position_without_tokens(
    logprobs: list[float], num_tokens: int
) -> None:
    queue: asyncio.Queue[Any] = asyncio.Queue()
    for end in range(1, len(logprobs) + 1):
        queue.put_nowait(output(logprobs[:end], finished=end == len(logprobs)))
    deltas = list[TokenDelta]()
    request = SampleRequest(
        id="s",
        prompt_token_ids=[1, 2, 3],
        sampling=Sampling(max_tokens=4),
        on_tokens=deltas.append,
        experts_from=0,
    )
    completion = await PendingSample(queue, request, lambda: (SPAN,))
    assert completion.token_ids == list(range(num_tokens))
    assert completion.logprobs == logprobs[:num_tokens]
    assert completion.finish == ("length" if num_tokens == 4 else "error")
    assert [span.end for span in completion.versions] == [num_tokens][: num_tokens > 0]
    assert completion.routed_experts is not None
    assert len(completion.routed_experts) == 3 + num_tokens
    assert [token for delta in deltas for token in delta.token_ids] == list(
        range(min(num_tokens, 3))
    )
    assert not any(math.isnan(logprob) for delta in deltas for logprob in delta.logprobs)


async def test_sample_ends_before_a_raw_logprob_that_is_nan() -> None:
    """The model's distribution may have NaN at a token that the constraints exclude."""
    found, raw = output([-1.0, -2.0, -3.0], finished=True), np.array([-1.5, NAN, -2.5], np.float32)
    rows = SamplingMaskLists(raw.view(np.uint8), np.arange(0, 13, 4))
    found.outputs[0].sampling_mask = [rows]
    request = SampleRequest(
        id="s", prompt_token_ids=[1], sampling=Sampling(max_tokens=3), raw_logprobs=True
    )
    completion = to_completion(found, request)
    assert (completion.finish, completion.token_ids) == ("error", [0])
    assert (completion.logprobs, completion.raw_logprobs) == ([-1.0], [-1.5])


class FakeLlm:
    """vLLM with two engines, of which the first one has a running request."""

    def __init__(self) -> None:
        self.engine_core = SimpleNamespace(
            core_engines=[b"0", b"1"],
            reqs_in_flight=SimpleNamespace(tokens={b"0": 9, b"1": 0}),
        )
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(block_size=16))
        self.ranks: list[int | None] = []

    async def add_request(
        self, *_: Any, data_parallel_rank: int | None, **__: Any
    ) -> asyncio.Queue[Any]:
        self.ranks.append(data_parallel_rank)
        queue: asyncio.Queue[Any] = asyncio.Queue()
        queue.put_nowait(output([-1.0], finished=True))
        return queue


async def test_observer_of_finished_samples_receives_the_rank_that_they_ran_on() -> None:
    llm, observed = FakeLlm(), list[int | None]()
    processes: Any = SimpleNamespace(llm=llm)
    adapters: Any = SimpleNamespace(request=lambda _: None)
    generation = Generation(processes, adapters, num_engines=2)
    for rank in (None, 0):
        request = SampleRequest(
            id="s",
            prompt_token_ids=[1, 2, 3],
            sampling=Sampling(max_tokens=1),
            data_parallel_rank=rank,
        )
        [pending] = await generation.submit(
            [request], 100, lambda sample, _: observed.append(sample.data_parallel_rank)
        )
        await pending
    assert llm.ranks == observed == [1, 0]

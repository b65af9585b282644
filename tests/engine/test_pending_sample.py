"""Samples whose constraints exclude all tokens at a position, as vLLM returns them."""

import asyncio
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.outputs import LogprobsLists, SamplingMaskLists

from engine.requests.logprob_arrays import LogprobChunks
from engine.requests.pending_sample import PendingSample, to_completion
from engine.requests.request_submission import Generation
from engine.types.samples import SampleRequest, Sampling, TokenDelta

NAN = math.nan


def lists(token_ids: Sequence[int], logprobs: Sequence[float]) -> LogprobsLists:
    ids = np.array(token_ids)[:, None]
    return LogprobsLists(ids, np.array(logprobs)[:, None], np.ones(len(ids)))


def output(logprobs: Sequence[float]) -> Any:
    """vLLM's last output of a sample with the tokens 0, 1, 2 and so on."""
    chunks, length = LogprobChunks(), len(logprobs)
    chunks.append(lists(range(length), logprobs), 1)
    span = SimpleNamespace(version="v0", start=0, end=length)
    sample = SimpleNamespace(
        token_ids=list(range(length)),
        logprobs=chunks,
        finish_reason="length",
        stop_reason=None,
        weight_versions=[span],
        sampling_mask=None,
        routed_experts=np.zeros((3 + length, 1, 1)),
    )
    return SimpleNamespace(outputs=[sample], num_cached_tokens=0)


class RunningState:
    """State of a running request in vLLM's output processor."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self.detokenizer = SimpleNamespace(num_output_tokens=lambda: self._num_tokens)
        self.logprobs_processor = SimpleNamespace(logprobs=LogprobChunks())
        self.num_cached_tokens = 0

    def receive(
        self, pending: PendingSample, token_ids: list[int], logprobs: Sequence[float]
    ) -> None:
        self._num_tokens += len(token_ids)
        new_logprobs = lists(token_ids, logprobs)
        self.logprobs_processor.logprobs.append(new_logprobs, 1)
        arrived = SimpleNamespace(new_token_ids=token_ids, new_logprobs=new_logprobs)
        pending.deliver(self, arrived, "v0")


async def test_exception_of_a_receiver_ends_its_sample() -> None:
    """Also if it is raised while vLLM processes the outputs of many requests."""
    received = list[TokenDelta]()

    def on_tokens(delta: TokenDelta) -> None:
        received.append(delta)
        raise ValueError("the stream is closed")

    queue = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, "s")
    request = SampleRequest(
        id="s", prompt_token_ids=[1], sampling=Sampling(max_tokens=4), on_tokens=on_tokens
    )
    pending, state = PendingSample(queue, request), RunningState()
    state.receive(pending, [5, 6], [-1.0, -2.0])
    state.receive(pending, [7], [-1.0])
    with pytest.raises(ValueError, match="the stream is closed"):
        await pending
    assert [delta.token_ids for delta in received] == [[5, 6]]


@pytest.mark.parametrize(
    ("logprobs", "num_tokens"),
    [([-1.0, -2.0, -3.0, -4.0], 4), ([-1.0, -2.0, NAN, -4.0], 2), ([NAN, -2.0, -3.0, NAN], 0)],
)
async def test_sample_ends_before_a_position_without_tokens(
    logprobs: list[float], num_tokens: int
) -> None:
    queue: asyncio.Queue[Any] = asyncio.Queue()
    deltas = list[TokenDelta]()
    request = SampleRequest(
        id="s",
        prompt_token_ids=[1, 2, 3],
        sampling=Sampling(max_tokens=4),
        on_tokens=deltas.append,
        experts_from=0,
    )
    pending = PendingSample(queue, request)
    state = RunningState()
    for token_id, logprob in enumerate(logprobs[:-1]):
        state.receive(pending, [token_id], [logprob])
    queue.put_nowait(output(logprobs))
    completion = await pending
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
    found, raw = output([-1.0, -2.0, -3.0]), np.array([-1.5, NAN, -2.5], np.float32)
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
        queue.put_nowait(output([-1.0]))
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

"""Whether a sample stands behind tokens that were put there, told from what each found cached."""

from typing import Any, cast

import pytest

from engine.protocol import Completion, SampleRequest, Sampling
from service.kv_reuse.splice_plan import SplicePlan

ENDS = (16, 240)


async def chain_that_heard(*cached: int) -> SplicePlan:
    """Of links that end at these places, each of which had so many tokens cached."""
    nothing = cast(Any, None)
    chain = SplicePlan(lease=nothing, spans=[], first_tokens=4, num_samples=1)
    for end, num_cached in zip(ENDS, cached, strict=False):
        sampling = Sampling(max_tokens=1)
        link = SampleRequest(id=str(end), prompt_token_ids=[1] * end, sampling=sampling)
        chain.prefill_requests.append(link)
        done = Completion(
            token_ids=[7],
            logprobs=[0.0],
            finish="length",
            versions=(),
            num_cached_tokens=num_cached,
        )
        await chain.on_completed(link, done)
    return chain


@pytest.mark.parametrize(
    ("cached", "of_the_sample", "is_approximate"),
    [
        ((0, 80), 240, True),  # the second link loaded, and the sample found it
        ((0, 16), 240, False),  # it computed all
        ((0, 16), 300, True),  # the sample loaded what stands right before it
        ((0, 80), 16, False),  # it found no more than the first link, which computes
        ((0, 80), 80, True),  # the second link's were evicted: it loaded for itself
        ((0,), 80, True),  # a link of which nothing was heard may have loaded
    ],
)
async def test_a_sample_is_exact_only_if_nothing_was_placed_in_front_of_it(
    cached: tuple[int, ...], of_the_sample: int, is_approximate: bool
) -> None:
    assert (await chain_that_heard(*cached)).is_approximate(of_the_sample) == is_approximate

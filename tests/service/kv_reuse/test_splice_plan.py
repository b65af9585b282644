"""Detection of spliced KV before a sample, from the cached-token counts of its chain."""

from typing import Any, cast

import pytest

from engine.types.samples import Completion, SampleRequest, Sampling
from service.kv.spans.spliced_prompt import SplicedPrompt

ENDS = (16, 240)


async def chain_that_heard(*cached: int) -> SplicedPrompt:
    """A plan of links that end at these positions, each with this many cached tokens reported."""
    nothing = cast(Any, None)
    chain = SplicedPrompt(pinned=nothing, spans=[], recompute_tokens=4, num_samples=1)
    for end, num_cached in zip(ENDS, cached, strict=False):
        sampling = Sampling(max_tokens=1)
        link = SampleRequest(id=str(end), prompt_token_ids=[1] * end, sampling=sampling)
        chain.prefills = [*chain.prefills, link]
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
        ((0, 80), 240, True),  # the second link loaded, and the sample hit it
        ((0, 16), 240, False),  # it prefilled everything
        ((0, 16), 300, True),  # the sample loaded the span right before it
        ((0, 80), 16, False),  # it hit no more than the first link, which prefills
        ((0, 80), 80, True),  # the second link's blocks were evicted: it loaded for itself
        ((0,), 80, True),  # a link without a report may have loaded
    ],
)
async def test_sample_is_exact_only_if_nothing_was_spliced_before_it(
    cached: tuple[int, ...], of_the_sample: int, is_approximate: bool
) -> None:
    assert (await chain_that_heard(*cached)).is_approximate(of_the_sample) == is_approximate

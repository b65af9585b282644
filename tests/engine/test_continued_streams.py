"""A seeded sample that is interrupted has the tokens that it would have without the interruption.

The reference is the sample of one run. Its continuation is what a move to another replica submits.
"""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from engine.types.samples import SampleRequest, Sampling
from engine.vllm_engine import VllmEngine
from tests.engine.seedling import settings

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [5, 7, 11, 13]
NUM_TOKENS = 24
CONTROLS = [
    {},
    {"top_k": 20, "top_p": 0.9},
    {"min_p": 0.01},
    {"presence_penalty": 0.5, "repetition_penalty": 1.1},
    {"temperature": 0.0},
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[VllmEngine]:
    started = VllmEngine(settings(max_context_tokens=128, max_sequences=8, cache_bytes=2**24))
    try:
        await started.start("v0")
        yield started
    finally:
        await started.stop()


async def sampled(engine: VllmEngine, sampling: Sampling, prior: list[int]) -> list[int]:
    request = SampleRequest(
        id=f"{len(prior)}-{sampling}",
        prompt_token_ids=[*PROMPT, *prior],
        sampling=sampling.after(len(prior), NUM_TOKENS - len(prior)),
        seed=3,
        num_prior_tokens=len(prior),
        num_drawn_tokens=len(prior),
    )
    (pending,) = await engine.submit([request])
    return [*prior, *(await pending).token_ids]


@pytest.mark.parametrize("controls", CONTROLS, ids=str)
async def test_continuation_has_the_tokens_of_the_whole_sample(
    engine: VllmEngine, controls: dict[str, float]
) -> None:
    named = {"temperature": 2.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **controls}
    sampling = Sampling(**named)  # type: ignore[arg-type]  # mixed types of one dictionary
    whole = await sampled(engine, sampling, [])
    for cut in (1, 7, NUM_TOKENS - 1):
        assert await sampled(engine, sampling, whole[:cut]) == whole


async def test_another_number_of_drawn_tokens_gives_other_tokens(engine: VllmEngine) -> None:
    sampling = Sampling(temperature=2.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    whole = await sampled(engine, sampling, [])
    request = SampleRequest(
        id="without",
        prompt_token_ids=[*PROMPT, *whole[:7]],
        sampling=sampling.after(7, NUM_TOKENS - 7),
        seed=3,
        num_prior_tokens=7,
    )
    (pending,) = await engine.submit([request])
    assert list((await pending).token_ids) != whole[7:]

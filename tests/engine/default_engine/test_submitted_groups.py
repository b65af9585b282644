"""The samples of a group, submitted in one message, are those that are submitted one by one."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.errors import RequestRefused
from engine.types.samples import Completion, SampleRequest, Sampling, StructuredOutputs
from engine.vllm_engine import VllmEngine
from tests.engine.seedling import BLOCK

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="package")]

_COUNT = itertools.count()
PROMPT = [10 + each % 60 for each in range(3 * BLOCK + 5)]
EQUAL = ("token_ids", "finish", "stop_reason", "text", "num_cached_tokens", "versions", "support")


def group(number: int, *, sampling: Sampling, **options: Any) -> list[SampleRequest]:
    """Samples with a cache of their own, so that the first computes the prompt."""
    name = f"group{next(_COUNT)}"
    return [
        SampleRequest(
            id=f"{name}-{index}",
            prompt_token_ids=PROMPT,
            sampling=sampling,
            seed=100 + index,
            cache_salt=name,
            **options,
        )
        for index in range(number)
    ]


async def one_by_one(engine: VllmEngine, samples: Sequence[SampleRequest]) -> list[Completion]:
    pending = [(await engine.submit([sample]))[0] for sample in samples]
    return list(await asyncio.gather(*pending))


async def together(engine: VllmEngine, samples: Sequence[SampleRequest]) -> list[Completion]:
    return list(await asyncio.gather(*await engine.submit(samples)))


SAMPLINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "truncated": {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_tokens": 3},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.2, "logit_bias": {20: 1.0}},
    "stop": {"stop": ("1", "2"), "stop_token_ids": (30,)},
    "grammar": {"structured_outputs": StructuredOutputs(regex="[0-9]{1,4}")},
}


@pytest.mark.parametrize("name", SAMPLINGS)
async def test_samples_are_those_that_are_submitted_alone(engine: VllmEngine, name: str) -> None:
    sampling = Sampling(max_tokens=12, **SAMPLINGS[name])
    options: dict[str, Any] = {"num_top_logprobs": 2, "returns_text": True, "support": True}
    alone = await one_by_one(engine, group(6, sampling=sampling, **options))
    found = await together(engine, group(6, sampling=sampling, **options))
    for field in EQUAL:
        assert [getattr(each, field) for each in found] == [getattr(each, field) for each in alone]
    assert len({tuple(each.token_ids) for each in found}) > 1  # each has its own seed
    for each, other in zip(found, alone, strict=True):
        assert each.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert each.top_logprobs is not None and other.top_logprobs is not None
        assert each.top_logprobs.token_ids.tolist() == other.top_logprobs.token_ids.tolist()


async def test_samples_without_seeds_differ(engine: VllmEngine) -> None:
    samples = [replace(each, seed=None) for each in group(4, sampling=Sampling(max_tokens=12))]
    found = await together(engine, samples)
    assert len({tuple(each.token_ids) for each in found}) == 4


async def test_abort_that_follows_the_submission_ends_all_samples(engine: VllmEngine) -> None:
    samples = group(8, sampling=Sampling(max_tokens=800, ignore_eos=True))
    pending = await engine.submit(samples)
    await engine.abort([sample.id for sample in samples[:7]])
    found = await asyncio.gather(*pending[:7])
    assert {each.finish for each in found} == {"abort"}
    await engine.abort([samples[7].id])
    assert (await pending[7]).finish == "abort"


async def test_refused_sample_ends_those_that_were_submitted_with_it(engine: VllmEngine) -> None:
    sampling = Sampling(max_tokens=800, ignore_eos=True)
    samples = group(3, sampling=sampling)
    too_long = replace(samples[0], id="too long", prompt_token_ids=[10] * 5000)
    with pytest.raises(RequestRefused):
        await engine.submit([*samples, too_long])
    again = [replace(each, sampling=Sampling(max_tokens=2)) for each in samples]
    assert len(await together(engine, again)) == 3  # no id is in use
    assert engine.progress([each.id for each in samples]) == [()] * 3

"""Early finish on the real engine: unneeded samples end at once, and cut ones are continued."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import REGISTRY
from safetensors.torch import load_file

from coppice import AsyncRollouts, Finish, Sample
from tests.engine.default_engine.test_vllm_engine import computed_prompt_tokens, prompt_of
from tests.engine.seedling import BLOCK, MODEL
from tests.serving import Served

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="package")]


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def rollouts(served: Served) -> AsyncIterator[AsyncRollouts]:
    async with AsyncRollouts(served.url, timeout=120) as rollouts:
        yield rollouts


def engine_steps() -> float:
    """Number of engine steps, from vLLM's own histogram of tokens per step."""
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    return sum(s.value for s in samples if s.name == "vllm:iteration_tokens_total_count")


async def steps_of(rollouts: AsyncRollouts, finish: Finish | None) -> tuple[float, list[Sample]]:
    """Number of engine steps for a group of 16 until it is idle, and the group."""
    before = engine_steps()
    [group] = (
        await rollouts.rollout(["Compute 12+34.\n"], n=16, max_tokens=256, seed=5, finish=finish)
    ).groups
    await asyncio.sleep(0.2)  # samples that wrongly continue would be visible now
    taken = group.samples if group.selected is None else [group.samples[i] for i in group.selected]
    return engine_steps() - before, list(taken)


async def test_unneeded_samples_end_within_two_steps(rollouts: AsyncRollouts) -> None:
    """A few steps precede and follow the tokens whether or not anything is cancelled."""
    longest, overhead = await least_overhead(rollouts, None)
    assert 0 <= overhead <= 3
    needed, too_many = await least_overhead(rollouts, Finish(num_samples=4))
    assert needed + 4 < longest, "nothing was left to cancel"
    assert too_many <= overhead + 2


async def least_overhead(rollouts: AsyncRollouts, finish: Finish | None) -> tuple[int, float]:
    """Length of the longest needed sample, and the steps beyond it, at the least delay."""
    runs = [await steps_of(rollouts, finish) for _ in range(8)]
    longest = [max(len(sample.token_ids) for sample in needed) for _, needed in runs]
    assert len(set(longest)) == 1, "a seed gives the same tokens"
    return longest[0], min(steps - longest[0] for steps, _ in runs)


async def scored(rollouts: AsyncRollouts, prompt: list[int], tokens: list[int]) -> list[float]:
    [score] = await rollouts.score([(prompt, [tokens])])
    found: list[float] = score.logprobs[0].tolist()
    return found


def assert_close(ours: list[float], theirs: list[float]) -> None:
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-3


async def cut(rollouts: AsyncRollouts, prompt: list[int], num_tokens: int) -> Sample:
    """A sample that was cut, here by its limit, so that the position is known."""
    result = await rollouts.rollout([prompt], max_tokens=num_tokens, ignore_eos=True)
    return result.groups[0].samples[0]


async def test_continuation_under_the_same_weights_hits_the_prefix_cache(
    rollouts: AsyncRollouts,
) -> None:
    prompt = prompt_of(50, first=21)
    begun = await cut(rollouts, prompt, 70)
    before = computed_prompt_tokens()
    result = await rollouts.rollout(
        [prompt], max_tokens=100, ignore_eos=True, continue_from=[[begun]]
    )
    assert computed_prompt_tokens() - before == 120 - 3 * BLOCK
    [sample] = result.groups[0].samples
    assert sample.token_ids[:70].tolist() == begun.token_ids.tolist()
    assert len(sample.token_ids) == 100
    assert [(span.version, span.start, span.end) for span in sample.versions] == [("v0", 0, 100)]
    assert_close(
        sample.logprobs.tolist(), await scored(rollouts, prompt, sample.token_ids.tolist())
    )


async def test_continuation_under_other_weights_has_logprobs_of_both(
    rollouts: AsyncRollouts,
) -> None:
    """Old tokens keep their sampling logprobs, so that importance weights are correct."""
    prompt = prompt_of(50, first=22)
    begun = await cut(rollouts, prompt, 70)
    await rollouts.publish_weights("v1", changed_weights())
    before = computed_prompt_tokens()
    options: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True}
    result = await rollouts.rollout([prompt], continue_from=[[begun]], **options)
    assert computed_prompt_tokens() - before == 120, "made by other weights, and still found"
    [sample] = result.groups[0].samples
    spans = [(span.version, span.start, span.end) for span in sample.versions]
    assert spans == [("v0", 0, 70), ("v1", 70, 100)]
    assert sample.logprobs[:70].tolist() == begun.logprobs.tolist()
    now = await scored(rollouts, prompt, sample.token_ids.tolist())
    assert_close(sample.logprobs[70:].tolist(), now[70:])
    assert max(abs(a - b) for a, b in zip(now[:70], begun.logprobs.tolist(), strict=True)) > 1e-2


def changed_weights(folder: Path = MODEL) -> dict[str, Any]:
    tensors = load_file(folder / "model.safetensors")
    return {n: t * 1.05 if n.endswith("down_proj.weight") else t for n, t in tensors.items()}

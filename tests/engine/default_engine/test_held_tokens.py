"""Tokens that EngineCore holds: all are there when a sample is aborted, and vLLM counts them."""

import asyncio
import time
from collections.abc import Mapping

import pytest
from prometheus_client import REGISTRY

from engine.types.samples import SampleRequest, Sampling
from engine.vllm_engine import VllmEngine

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="package")]

LATENCY = "vllm:inter_token_latency_seconds"
STEPS = "vllm:iteration_tokens_total"
GENERATED = "vllm:generation_tokens_total"


def request(name: str, max_tokens: int) -> SampleRequest:
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    return SampleRequest(id=name, prompt_token_ids=[5, 6, 7, 8], sampling=sampling)


def metrics() -> Mapping[str, float]:
    """vLLM's metrics of the latency between tokens, of steps and of generated tokens."""
    names = [f"{name}_{value}" for name in (LATENCY, STEPS) for value in ("count", "sum")]
    names.append(GENERATED)
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    found = dict.fromkeys(names, 0.0)
    for sample in samples:
        if sample.name in found:
            found[sample.name] += sample.value
    return found


async def test_aborted_sample_has_all_tokens_until_then(engine: VllmEngine) -> None:
    """Also the tokens that have not been sent yet when the engine is told to abort it."""
    [pending] = await engine.submit([request("held-aborted", 400)])
    ended = asyncio.ensure_future(pending)
    while not any(engine.progress(["held-aborted"])):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    [known] = engine.progress(["held-aborted"])
    await engine.abort(["held-aborted"])
    completion = await ended
    assert completion.finish == "abort"
    assert len(completion.token_ids) == len(completion.logprobs) > known[-1].end
    assert completion.versions[-1].end == len(completion.token_ids)


async def test_metrics_count_every_token_and_step(engine: VllmEngine) -> None:
    before, began = metrics(), time.monotonic()
    samples = [request(f"held-counted-{number}", 50 + number) for number in range(4)]
    await asyncio.gather(*await engine.submit(samples))
    seconds = time.monotonic() - began
    new = {name: value - before[name] for name, value in metrics().items()}
    num_tokens = sum(sample.sampling.max_tokens for sample in samples)
    assert new[GENERATED] == num_tokens
    assert new[f"{LATENCY}_count"] == num_tokens - len(samples)
    assert 0 < new[f"{LATENCY}_sum"] / new[f"{LATENCY}_count"] < seconds / 50
    assert 0 <= new[f"{STEPS}_sum"] - num_tokens <= 4 * len(samples), "the prompt's tokens"
    assert 53 <= new[f"{STEPS}_count"] <= 53 + len(samples)

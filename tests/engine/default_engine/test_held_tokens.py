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


def request(name: str, max_tokens: int) -> SampleRequest:
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    return SampleRequest(id=name, prompt_token_ids=[5, 6, 7, 8], sampling=sampling)


def latencies() -> Mapping[str, float]:
    """Count and sum of the latencies between tokens, and the number of generated tokens."""
    names = [f"{LATENCY}_count", f"{LATENCY}_sum", "vllm:generation_tokens_total"]
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    found = dict.fromkeys(names, 0.0)
    for sample in samples:
        if sample.name in found:
            found[sample.name] += sample.value
    return found


async def test_aborted_sample_has_all_tokens_until_then(engine: VllmEngine) -> None:
    """Also the tokens of less than a second, which is how long they are held."""
    [pending] = await engine.submit([request("held-aborted", 400)])
    ended = asyncio.ensure_future(pending)
    while not any(engine.progress(["held-aborted"])):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    [known] = engine.progress(["held-aborted"])
    await engine.abort(["held-aborted"])
    completion = await ended
    assert completion.finish == "abort"
    assert len(completion.token_ids) == len(completion.logprobs) > known[-1].end + 5
    assert completion.versions[-1].end == len(completion.token_ids)


async def test_latency_is_counted_for_every_token(engine: VllmEngine) -> None:
    before, began = latencies(), time.monotonic()
    samples = [request(f"held-counted-{number}", 50 + number) for number in range(4)]
    await asyncio.gather(*await engine.submit(samples))
    after, seconds = latencies(), time.monotonic() - began
    num_tokens = sum(sample.sampling.max_tokens for sample in samples)
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == (
        num_tokens
    )
    assert after[f"{LATENCY}_count"] - before[f"{LATENCY}_count"] == num_tokens - len(samples)
    mean = (after[f"{LATENCY}_sum"] - before[f"{LATENCY}_sum"]) / (num_tokens - len(samples))
    assert 0 < mean < seconds / 50

"""Samples that go on at another real engine have the tokens and columns of one engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio

from engine.vllm_engine import VllmEngine
from service.cluster.in_memory_registry import InMemoryRegistry
from tests.cluster import replica, sees
from tests.engine.seedling import settings
from tests.serving import Served

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

MAX_TOKENS = 400
NUM_SAMPLES = 4
TOLERANCE = 1e-3
COLUMNS = {
    "return_support": True,
    "top_logprobs": 3,
    "logprob_token_ids": [5, 6],
    "logprobs_mode": "raw_logprobs",
}


def request(first: int, **options: Any) -> dict[str, Any]:
    """Rollout of a group of three samples and one of a single sample."""
    prompts = [[first + i % 90 for i in range(70)], [first + 7 + i % 80 for i in range(45)]]
    groups = [
        {"prompt": {"token_ids": prompt}, "n": n, "seed": n}
        for prompt, n in zip(prompts, (3, 1), strict=True)
    ]
    sampling = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
    return {"groups": groups, "sampling": sampling, **options}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Served, Served]]:
    base, registry = tmp_path_factory.mktemp("pair"), InMemoryRegistry()
    async with AsyncExitStack() as stack:
        replicas = [
            await stack.enter_async_context(
                replica(
                    base / name,
                    VllmEngine(settings(cache_directory=base / "cache")),
                    registry,
                    weights={"peers": ["http://127.0.0.1:*"]},
                    cluster={"expire_seconds": 600.0, "handoff_seconds": 60.0},
                )
            )
            for name in "ab"
        ]
        for served in replicas:
            await sees(served, 2)
        yield replicas[0], replicas[1]


async def rollout(served: Served, body: dict[str, Any]) -> Any:
    response = await served.http.post("/v1/rollouts", json=body, follow_redirects=True, timeout=600)
    assert response.status_code == 200, response.text
    return response.json()


async def have_sampled(served: Served, num_tokens: int) -> None:
    """Wait until all samples of a replica have this many tokens."""
    async with asyncio.timeout(120):
        while True:
            rollouts = served.server.rollouts.in_flight()
            ids = [i for each in rollouts for group in each.groups for i in group.sample_ids]
            spans = served.server.engine.progress(ids)
            if len(ids) == NUM_SAMPLES and all(s and s[-1].end >= num_tokens for s in spans):
                return
            await asyncio.sleep(0.001)


def samples(answer: Any) -> list[Any]:
    return [sample for group in answer["groups"] for sample in group["samples"]]


@pytest.mark.parametrize("options", [{}, COLUMNS], ids=["tokens", "columns"])
async def test_samples_that_are_handed_over_twice_are_those_of_one_engine(
    pair: tuple[Served, Served], options: dict[str, Any]
) -> None:
    """To the other replica, and back to the first one."""
    a, b = pair
    expected = await rollout(a, request(5, **options))
    calling = asyncio.create_task(rollout(a, request(5, **options)))
    await have_sampled(a, 100)
    await a.server.handoff.sender.send_all(a.server.handoff.running, 60.0)
    await have_sampled(b, 200)
    await b.server.handoff.sender.send_all(b.server.handoff.running, 60.0)
    for one, other in zip(samples(await calling), samples(expected), strict=True):
        assert one["token_ids"] == other["token_ids"]
        assert one["logprobs"] == pytest.approx(other["logprobs"], abs=TOLERANCE)
        assert one.keys() == other.keys()
        assert one.get("support") == other.get("support")
        for name in {"top_logprobs", "given_logprobs"} & one.keys():
            assert one[name]["offsets"] == other[name]["offsets"]
            logprobs = pytest.approx(other[name]["logprobs"], abs=TOLERANCE)
            assert one[name]["logprobs"] == logprobs

"""Samples and trees that move between two real engines have the tokens of no move.

Samples go on from their KV.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import Counter

from engine.protocol import Engine
from engine.settings import AttentionSettings
from engine.types import Completion, FinishedListener, SampleRequest
from engine.vllm_engine import VllmEngine
from service.cluster.in_memory import InMemoryRegistry
from service.kv_reuse.prompt_sections import Scope
from service.kv_reuse.span_cache import EntryKey
from service.trees.tree_group import TreeGroup
from tests.cluster import replica, sees
from tests.engine.seedling import BLOCK, settings
from tests.service.trees import check_tree
from tests.serving import Served

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

MAX_TOKENS = 400
NUM_SAMPLES = 4
TOLERANCE = 1e-3


def request(first: int) -> dict[str, Any]:
    """Rollout of a group of three samples and one of a single sample."""
    prompts = [[first + i % 90 for i in range(70)], [first + 7 + i % 80 for i in range(45)]]
    groups = [
        {"prompt": {"token_ids": prompt}, "n": n, "seed": n}
        for prompt, n in zip(prompts, (3, 1), strict=True)
    ]
    return {"groups": groups, "sampling": {"max_tokens": MAX_TOKENS, "ignore_eos": True}}


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=["shared memory", pytest.param("http", marks=pytest.mark.exhaustive)],
)
async def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Served, Served]]:
    """Two replicas, of which the second has its shared memory elsewhere if it reads by HTTP."""
    base, registry = tmp_path_factory.mktemp("pair"), InMemoryRegistry()
    elsewhere = base / "shm"
    elsewhere.mkdir()
    attention = AttentionSettings(cache_directory=base)
    async with AsyncExitStack() as stack:
        replicas = []
        for name in "ab":
            is_elsewhere = name == "b" and request.param == "http"
            served = await stack.enter_async_context(
                replica(
                    base / name,
                    VllmEngine(settings(prompt_kv=True), attention=attention),
                    registry,
                    kv={"capacity_bytes": 2**27, "spans_bytes": 2**27}
                    | ({"directory": elsewhere} if is_elsewhere else {}),
                    weights={"peers": ["http://127.0.0.1:*"]},
                    cluster={"expire_seconds": 600.0, "move_seconds": 60.0},
                )
            )
            replicas.append(served)
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


def counts_of(counter: Counter) -> dict[str, float]:
    (family,) = counter.collect()
    return {
        each.labels["outcome"]: each.value
        for each in family.samples
        if each.name.endswith("_total") and each.value
    }


def counted(served: Served) -> dict[str, float]:
    return counts_of(served.server.metrics.cluster.moved_kv)


def num_moved(served: Served) -> tuple[float, float]:
    """Numbers of moved rollouts and of their paths."""
    moves = counts_of(served.server.metrics.cluster.moves)
    return moves.get("moved", 0), counted(served).get("tree", 0)


def samples(answer: Any) -> list[Any]:
    return [sample for group in answer["groups"] for sample in group["samples"]]


def listen_finished(engine: Engine, listener: FinishedListener) -> None:
    """Call the listener with each sample that is submitted from now on, once it has finished."""
    submit = engine.submit

    async def observed(sample: SampleRequest, done: Awaitable[Completion]) -> Completion:
        completion = await done
        listener(sample, completion)
        return completion

    async def submit_observed(samples: Sequence[SampleRequest]) -> list[Awaitable[Completion]]:
        awaitables = await submit(samples)
        return [observed(*pair) for pair in zip(samples, awaitables, strict=True)]

    engine.submit = submit_observed  # type: ignore[method-assign]


def recorder(recomputed: list[int]) -> FinishedListener:
    """Listener that adds the tokens computed again of each sample that goes on."""

    def on_finished(sample: SampleRequest, done: Completion) -> None:
        if sample.num_prior_tokens:
            recomputed.append(len(sample.prompt_token_ids) - done.num_cached_tokens)

    return on_finished


async def moved(
    a: Served, b: Served, body: dict[str, Any], seconds: float
) -> tuple[Any, list[int]]:
    """Answer of a rollout that is moved, and the tokens computed again per sample."""
    recomputed = list[int]()
    listen_finished(b.server.engine, recorder(recomputed))
    calling = asyncio.create_task(rollout(a, body))
    await have_sampled(a, 100)
    await a.server.move_sender.send_all(seconds)
    answer = await calling
    return answer, recomputed


def assert_same(answer: Any, expected: Any) -> None:
    for one, other in zip(samples(answer), samples(expected), strict=True):
        assert one["token_ids"] == other["token_ids"]
        assert one["logprobs"] == pytest.approx(other["logprobs"], abs=TOLERANCE)


async def test_moved_samples_compute_at_most_a_block_again(pair: tuple[Served, Served]) -> None:
    a, b = pair
    expected = await rollout(a, request(5))
    before = counted(b)
    answer, recomputed = await moved(a, b, request(5), 60.0)
    assert_same(answer, expected)
    assert len(recomputed) == NUM_SAMPLES
    assert max(recomputed) <= BLOCK
    assert counted(b)["loaded"] - before.get("loaded", 0) == NUM_SAMPLES
    async with asyncio.timeout(30):
        while b.server.kv_reuse.cache.num_bytes:
            await asyncio.sleep(0.01)
    status = a.server.prompt_kv.status()
    assert (status.num_handles, status.leased_bytes, status.reserved_bytes) == (0, 0, 0)


async def test_samples_that_move_again_compute_at_most_a_block_each_time(
    pair: tuple[Served, Served],
) -> None:
    """Back to the first replica, from blocks that the second one has loaded."""
    a, b = pair
    expected = await rollout(a, request(65))
    before, computed = counted(a).get("loaded", 0), list[int]()

    def on_finished(sample: SampleRequest, done: Completion) -> None:
        if sample.export is not None or sample.num_prior_tokens:
            computed.append(len(sample.prompt_token_ids) - done.num_cached_tokens)

    calling = asyncio.create_task(rollout(a, request(65)))
    await have_sampled(a, 100)
    for served in (a, b):
        listen_finished(served.server.engine, on_finished)
    await a.server.move_sender.send_all(60.0)
    await have_sampled(b, 200)
    await b.server.move_sender.send_all(60.0)
    assert_same(await calling, expected)
    assert counted(a)["loaded"] - before == NUM_SAMPLES
    assert max(computed) <= BLOCK


async def test_moved_samples_are_prefilled_if_the_arena_is_full(
    pair: tuple[Served, Served],
) -> None:
    """The result is the same; the whole sequence is computed again."""
    a, b = pair
    expected = await rollout(a, request(105))
    cache, held = b.server.kv_reuse.cache, []
    key = EntryKey(Scope("", None), 0, "", b"")
    for num_tokens in (512, 16):
        while (entry := cache.reserve(num_tokens, key)) is not None:
            held.append(entry)
    try:
        answer, recomputed = await moved(a, b, request(105), 60.0)
    finally:
        for entry in held:
            cache.unpin(entry, settled=True)
    assert_same(answer, expected)
    assert counted(b)["no_room"]
    assert max(recomputed) > 100


TREES: dict[str, dict[str, Any]] = {
    "interval": {"mode": "interval", "interval": 90, "max_depth": 3, "max_leaves": 8},
    "positions": {"mode": "positions", "positions": [0, 150], "factor": 3, "max_leaves": 9},
    "entropy": {"mode": "entropy", "first_split": 8, "max_depth": 2, "max_leaves": 5},
}


def tree_request(kind: str, temperature: float, *, first: int) -> dict[str, Any]:
    prompt = [first + i % 70 for i in range(50)]
    return {
        "groups": [{"prompt": {"token_ids": prompt}, "seed": 3}],
        "sampling": {"max_tokens": 300, "ignore_eos": True, "temperature": temperature},
        "branching": {**TREES[kind], "flatten": True},
        "return_support": True,
    }


async def have_grown(served: Served, num_tokens: int, calling: asyncio.Task[Any]) -> None:
    """Wait until the segments and the running paths of a tree have this many tokens."""
    async with asyncio.timeout(120):
        while True:
            assert not calling.done(), "the tree was complete before its move"
            for rollout in served.server.rollouts.in_flight():
                if rollout.ended:
                    continue
                (group,) = rollout.groups
                assert isinstance(group, TreeGroup)
                paths = group.running_paths
                spans = served.server.engine.progress([path.id for path in paths])
                new = sum(each[-1].end for each in spans if each)
                prior = sum(len(path.prior_token_ids) for path in paths)
                if group.tree.num_tokens + prior + new >= num_tokens and new:
                    return
            await asyncio.sleep(0.001)


def tree_shape(answer: Any) -> list[Any]:
    """Segments below each other, without ids; equal parts of siblings are in any order."""
    (group,) = answer["groups"]
    check_tree(group)
    names = ("depth", "token_ids", "finish_reason", "num_leaves", "support")

    def below(parent: str | None) -> list[Any]:
        children = [each for each in group["segments"] if each.get("parent") == parent]
        found = [([each[name] for name in names], below(each["id"])) for each in children]
        return sorted(found, key=repr)

    return below(None)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", TREES)
async def test_moved_tree_has_the_segments_of_no_move(
    pair: tuple[Served, Served], kind: str, temperature: float
) -> None:
    """It moves to the other replica, which prefills each token once, and back."""
    a, b = pair
    body = tree_request(kind, temperature, first=len(kind) + int(temperature))
    expected = await rollout(a, body)
    num_tokens = sum(len(each["token_ids"]) for each in expected["groups"][0]["segments"])
    before = [num_moved(served) for served in pair]
    calling = asyncio.create_task(rollout(a, body))
    recomputed = list[int]()
    listen_finished(b.server.engine, recorder(recomputed))
    await have_grown(a, num_tokens // 2, calling)
    await a.server.move_sender.send_all(60.0)
    await have_grown(b, num_tokens * 3 // 4, calling)
    await b.server.move_sender.send_all(60.0)
    answer = await calling
    assert recomputed and sum(recomputed) <= 50 + num_tokens * 2 // 3 + BLOCK * len(recomputed)
    assert tree_shape(answer) == tree_shape(expected)
    rows = [
        sorted((row["token_ids"], row["logprobs"]) for row in samples(each))
        for each in (answer, expected)
    ]
    for (tokens, logprobs), (other, others) in zip(*rows, strict=True):
        assert tokens == other
        assert logprobs == pytest.approx(others, abs=TOLERANCE)
    for served, (num_rollouts, num_paths) in zip(pair, before, strict=True):
        assert num_moved(served)[0] == num_rollouts + 1
        assert num_moved(served)[1] > num_paths

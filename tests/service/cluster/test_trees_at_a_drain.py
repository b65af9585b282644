"""A running tree stays where it is, and ends with the drain. The result of a tree is moved."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from service.cluster.in_memory_registry import InMemoryRegistry
from tests.service.cluster.test_handoff import (
    ASYNC,
    drain,
    engine_of,
    post,
    replicas,
    see_each_other,
    submitted,
)
from tests.service.test_rollouts import body, group, running_samples
from tests.service.trees import BLOCK, check_tree, tree_request
from tests.serving import Served

pytestmark = pytest.mark.slow


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[list[Served]]:
    async with replicas(tmp_path, InMemoryRegistry()) as served:
        await see_each_other(*served)
        yield served


async def test_result_of_a_tree_that_is_not_fetched_yet_is_moved(pair: list[Served]) -> None:
    a, b = pair
    accepted = await a.http.post("/v1/rollouts", json=tree_request(flatten=True), headers=ASYNC)
    place = accepted.headers["location"]
    while a.server.rollouts.num_running:
        engine_of(a).step(BLOCK)
        await asyncio.sleep(0.001)
    expected = a.server.rollouts.find(place.rpartition("/")[2])
    assert expected is not None
    before = (await expected.answer()).model_dump(mode="json")
    await drain(a)
    answer = (await b.http.get(place)).json()
    assert not engine_of(b).submitted
    (tree,) = answer["groups"]
    check_tree(tree)
    assert len(tree["samples"]) == len(tree["leaves"])
    assert tree == before["groups"][0]


async def test_tree_that_outlives_the_drain_ends_as_partial(pair: list[Served]) -> None:
    a, b = pair
    calling = asyncio.create_task(post(a, tree_request()))
    await running_samples(a, 2)
    engine_of(a).step(5)
    await a.server.drain(0.5)
    answer = (await calling).json()
    assert answer["outcome"] != "done"
    assert [len(each["token_ids"]) for each in answer["groups"][0]["segments"]] == [5, 5]
    assert not engine_of(b).submitted


@pytest.mark.parametrize("mode", ["interval", "external"])
async def test_running_tree_is_not_moved(pair: list[Served], mode: str) -> None:
    """The sender tries all rollouts at once, so it has decided when another one has moved."""
    a, b = pair
    request = tree_request() if mode == "interval" else tree_request("external")
    opened = await a.http.post("/v1/rollouts", json=request, headers=ASYNC)
    place, branching = opened.headers["location"], None
    if mode == "external":
        branching = asyncio.create_task(a.http.post(f"{place}/branch", json={"max_tokens": 20}))
    num_paths = 1 if mode == "external" else 2
    await running_samples(a, num_paths)
    other = asyncio.create_task(post(a, body(group(7))))
    await running_samples(a, num_paths + 1)
    draining = asyncio.create_task(drain(a))
    await submitted(b, 1)
    engine_of(b).step(4)
    assert (await other).json()["outcome"] == "done"
    engine_of(a).instant = True
    engine_of(a).step(1000)
    if branching is not None:
        assert (await branching).status_code == 200
    await a.http.get(place, params={"wait": 5})
    await draining
    assert len(engine_of(b).submitted) == 1

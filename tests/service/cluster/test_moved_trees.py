"""A tree that is moved grows as it would without the move, wherever its paths were suspended."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from coppice import AsyncRollouts, Branching
from engine.types import SampleRequest
from service.cluster.in_memory import InMemoryRegistry
from service.moves.state import estimated_bytes, state_of
from service.rollouts.fairness import SLICE_SECONDS
from service.rollouts.rollout import Rollout
from service.trees import tree_group
from service.trees.path_request import path_request
from tests.service.cluster.test_move_outcomes import sender_of
from tests.service.cluster.test_moves import (
    ASYNC,
    drain,
    engine_of,
    post,
    replicas,
    see_each_other,
    submitted,
)
from tests.service.test_rollouts import body, group, running_samples
from tests.service.trees import BLOCK, check_cuts, check_tree, stop_after, tree_request
from tests.serving import Served

pytestmark = pytest.mark.slow

PROMPT = [1]
STEPS = 7
"""Tokens per call of `step`, so that paths are suspended anywhere."""
FULL: dict[str, Any] = {"return_support": True, "logprobs_mode": "raw_logprobs"}
STOPS: dict[str, Any] = {"sampling": {"max_tokens": 200, "stop": [chr(60)]}}
"""Paths end at the 60th token, before they are cut, and their other leaves start above."""
TREES: dict[str, dict[str, Any]] = {
    "interval": tree_request(prompt=PROMPT, flatten=True, rest=FULL),
    "later first split": tree_request(prompt=PROMPT, first_split=40, max_depth=3, max_leaves=8),
    "positions": tree_request("positions", prompt=PROMPT, positions=[0, 30, 90], max_depth=3),
    "entropy": tree_request("entropy", prompt=PROMPT, first_split=8, max_leaves=6, rest=FULL),
    "entropies of an interval": tree_request(prompt=PROMPT, entropy={"k": 4}),
    "budget": tree_request(prompt=PROMPT, max_new_tokens_total=300, max_leaves=8, max_depth=3),
    "redistributed": tree_request(prompt=PROMPT, max_leaves=8, max_depth=3, rest=STOPS),
    "redistributed entropy": tree_request(
        "entropy", prompt=PROMPT, first_split=70, max_leaves=4, rest=STOPS
    ),
    "seeded": tree_request(prompt=PROMPT, rest={"groups": [group(*PROMPT, seed=5)]}),
}


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[list[Served]]:
    async with replicas(tmp_path, InMemoryRegistry()) as served:
        await see_each_other(*served)
        yield served


def shape(answer: dict[str, Any]) -> list[Any]:
    """Segments of a tree below each other, without their ids and their order."""
    (tree,) = answer["groups"]
    check_tree(tree)
    check_cuts(tree, tree["num_prompt_tokens"])

    def below(parent: str | None) -> list[Any]:
        children = [each for each in tree["segments"] if each.get("parent") == parent]
        plain = [{**each, "id": "", "parent": below(each["id"])} for each in children]
        return sorted(plain, key=repr)

    return below(None)


def rest_of(answer: dict[str, Any]) -> Any:
    """Everything but the segments, and the ids of the rollout and of leaves."""
    (tree,) = answer["groups"]
    head = {**tree, "segments": None, "leaves": len(tree["leaves"])}
    return head, answer["outcome"], answer["usage"]


async def grown(served: Served, calling: asyncio.Task[Any]) -> Any:
    """Answer of a tree whose paths are stepped until it is complete."""
    while not calling.done():
        engine_of(served).step(STEPS)
        await asyncio.sleep(0.001)
    answer = (await calling).json()
    assert "groups" in answer, answer
    return answer


async def undisturbed(served: Served, request: dict[str, Any]) -> Any:
    return await grown(served, asyncio.create_task(post(served, request)))


async def grown_by(served: Served, num_steps: int) -> None:
    for _ in range(num_steps):
        async with asyncio.timeout(30):
            while not engine_of(served).running:
                await asyncio.sleep(0.001)
        engine_of(served).step(STEPS)
        await asyncio.sleep(0.005)


async def suspended_now(served: Served, relocate: Callable[[Rollout], Any]) -> None:
    (rollout,) = served.server.rollouts.in_flight()
    await rollout.suspend(engine_of(served), relocate)


async def stays(rollout: Rollout) -> None:
    assert rollout.is_suspended


async def has_submitted_again(served: Served, before: int) -> None:
    async with asyncio.timeout(30):
        while len(engine_of(served).submitted) == before:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("num_steps", [0, 3, 5, 9, 11])
@pytest.mark.parametrize("kind", TREES)
async def test_moved_tree_is_that_of_an_undisturbed_run(
    pair: list[Served], kind: str, num_steps: int
) -> None:
    a, b = pair
    expected = await undisturbed(a, TREES[kind])
    calling = asyncio.create_task(post(a, TREES[kind]))
    await has_submitted_again(a, len(engine_of(a).submitted))
    await grown_by(a, num_steps)
    await drain(a)
    assert not engine_of(a).running
    answer = await grown(b, calling)
    assert engine_of(b).submitted
    assert shape(answer) == shape(expected)
    assert rest_of(answer) == rest_of(expected)


@pytest.mark.parametrize("kind", TREES)
async def test_tree_that_no_replica_accepts_grows_where_it_is(
    pair: list[Served], kind: str
) -> None:
    a, b = pair
    expected = await undisturbed(a, TREES[kind])
    b.server.admission.close()
    calling = asyncio.create_task(post(a, TREES[kind]))
    await grown_by(a, 6)
    draining = asyncio.create_task(drain(a))
    await has_submitted_again(a, len(engine_of(a).submitted))
    answer = await grown(a, calling)
    await draining
    assert engine_of(b).submitted == []
    assert (shape(answer), rest_of(answer)) == (shape(expected), rest_of(expected))


@pytest.mark.parametrize("kind", TREES)
async def test_tree_may_move_after_every_step(pair: list[Served], kind: str) -> None:
    a, b = pair
    a.http.max_redirects = 1000  # one per move
    expected = await undisturbed(a, TREES[kind])
    calling = asyncio.create_task(post(a, TREES[kind]))
    await grown_by(a, 1)
    here, there = a, b
    while here.server.rollouts.num_running:
        engine_of(here).step(STEPS)
        await asyncio.sleep(0.005)
        await here.server.move_sender.send_all(30)
        if there.server.rollouts.num_running:
            here, there = there, here
    answer = (await calling).json()
    assert len(engine_of(b).submitted) > 8
    assert (shape(answer), rest_of(answer)) == (shape(expected), rest_of(expected))


async def test_moved_path_continues_its_random_stream(pair: list[Served]) -> None:
    a, b = pair
    calling = asyncio.create_task(post(a, TREES["seeded"]))
    await grown_by(a, 6)
    running = [each.request for each in engine_of(a).running.values()]
    await drain(a)
    await running_samples(b, 4)
    moved = engine_of(b).submitted
    assert sorted(str(each.seed) for each in moved) == sorted(str(each.seed) for each in running)
    assert len({each.seed for each in moved}) == 4
    assert {each.num_drawn_tokens for each in moved} == {STEPS}
    await grown(b, calling)


async def test_paths_that_have_not_started_move(pair: list[Served]) -> None:
    """Their parents end in the step before the suspension."""
    a, b = pair
    expected = await undisturbed(a, TREES["interval"])
    calling = asyncio.create_task(post(a, TREES["interval"]))
    await running_samples(a, 2)
    num_submitted = len(engine_of(a).submitted)

    async def relocate(rollout: Rollout) -> None:
        state = await state_of(rollout, source=a.server.cluster.own_id, version="v0")
        assert [path.segment.token_ids for path in state.groups[0].tree.paths] == [[]] * 4  # type: ignore[union-attr]
        content = state.model_dump_json()
        headers = {"content-type": "application/json"}
        response = await b.http.post("/v1/moves", content=content, headers=headers)
        assert response.status_code == 201, response.text
        rollout.moved_to = b.url

    engine_of(a).step(BLOCK)
    await suspended_now(a, relocate)
    answer = await grown(b, calling)
    assert len(engine_of(a).submitted) == num_submitted
    assert (shape(answer), rest_of(answer)) == (shape(expected), rest_of(expected))


async def test_paths_that_have_not_started_continue_here(pair: list[Served]) -> None:
    a, _ = pair
    expected = await undisturbed(a, TREES["interval"])
    calling = asyncio.create_task(post(a, TREES["interval"]))
    await running_samples(a, 2)
    engine_of(a).step(BLOCK)
    await suspended_now(a, stays)
    answer = await grown(a, calling)
    assert (shape(answer), rest_of(answer)) == (shape(expected), rest_of(expected))


async def test_enough_leaves_end_a_tree_that_is_being_suspended(pair: list[Served]) -> None:
    a, _ = pair
    request = tree_request(rest={"finish": {"num_samples": 1}})
    calling = asyncio.create_task(post(a, request))
    await running_samples(a, 2)
    stop_after(engine_of(a), 5, 0)
    engine_of(a).step(5)
    await suspended_now(a, stays)
    answer = (await calling).json()
    (tree,) = answer["groups"]
    check_tree(tree)
    assert answer["outcome"] == "done"
    assert [each["finish_reason"] for each in tree["segments"]] == ["stop", "surplus"]


@pytest.mark.parametrize("num_tokens", [5, BLOCK])
async def test_tree_that_is_cancelled_during_its_move_keeps_its_tokens(
    pair: list[Served], num_tokens: int
) -> None:
    """Paths that have not started, below segments of a block, are no segments."""
    a, _ = pair
    calling = asyncio.create_task(post(a, tree_request()))
    await running_samples(a, 2)
    engine_of(a).step(num_tokens)

    async def cancel(rollout: Rollout) -> None:
        await a.server.rollouts.cancel(rollout)
        assert not rollout.is_suspended

    await suspended_now(a, cancel)
    answer = (await calling).json()
    (tree,) = answer["groups"]
    check_tree(tree)
    assert answer["outcome"] == "cancelled"
    assert [len(each["token_ids"]) for each in tree["segments"]] == [num_tokens] * 2
    assert not engine_of(a).running


async def test_tree_that_is_cancelled_while_it_is_suspended_keeps_its_tokens(
    pair: list[Served],
) -> None:
    a, _ = pair
    calling = asyncio.create_task(post(a, tree_request()))
    await running_samples(a, 2)
    engine_of(a).step(5)
    (rollout,) = a.server.rollouts.in_flight()
    await rollout.end(engine_of(a), "suspended")
    await a.server.rollouts.cancel(rollout)
    answer = (await calling).json()
    (tree,) = answer["groups"]
    assert answer["outcome"] == "cancelled"
    assert [each["finish_reason"] for each in tree["segments"]] == ["aborted"] * 2
    assert [len(each["token_ids"]) for each in tree["segments"]] == [5, 5]


async def test_requests_of_a_resumed_tree_are_built_in_several_turns(
    pair: list[Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tree is cancelled after the first of them, and submits none."""
    a, _ = pair
    calling = asyncio.create_task(post(a, tree_request()))
    await running_samples(a, 2)
    engine_of(a).step(BLOCK)
    (rollout,), tasks = a.server.rollouts.in_flight(), list[asyncio.Task[None]]()

    def build_slowly(*args: Any, **options: Any) -> SampleRequest:
        time.sleep(2 * SLICE_SECONDS)
        if not tasks:
            tasks.append(asyncio.create_task(a.server.rollouts.cancel(rollout)))
        return path_request(*args, **options)

    num_submitted = len(engine_of(a).submitted)
    monkeypatch.setattr(tree_group, "path_request", build_slowly)
    await suspended_now(a, stays)
    answer = (await calling).json()
    await asyncio.gather(*tasks)
    assert answer["outcome"] == "cancelled"
    assert [len(each["token_ids"]) for each in answer["groups"][0]["segments"]] == [BLOCK] * 2
    assert len(engine_of(a).submitted) == num_submitted


async def test_several_trees_of_a_rollout_move(pair: list[Served]) -> None:
    """One of them is complete, and another one is cut."""
    a, b = pair
    request = tree_request(max_tokens=100, rest={"groups": [group(1), group(*range(1, 20))]})
    calling = asyncio.create_task(post(a, request))
    await running_samples(a, 4)
    for sample in list(engine_of(a).running.values())[:2]:
        sample.limit, sample.ends = 3, "stop"
    engine_of(a).step(3)
    await submitted(a, 6)  # the leaves of the paths that have stopped start again
    for sample in list(engine_of(a).running.values())[-2:]:
        sample.limit, sample.ends = 3, "stop"
    engine_of(a).step(3)
    await running_samples(a, 2)
    await drain(a)
    await running_samples(b, 2)
    (rollout,) = b.server.rollouts.in_flight()
    assert rollout.progress().num_samples_done == 4
    answer = await grown(b, calling)
    first, second = answer["groups"]
    for tree in (first, second):
        check_tree(tree)
        assert (tree["outcome"], len(tree["leaves"])) == ("done", 4)
    assert [len(each["token_ids"]) for each in first["segments"]] == [3] * 4
    assert answer["usage"]["num_samples"] == 8


async def test_moved_tree_reserves_the_leaves_that_have_not_ended(pair: list[Served]) -> None:
    a, b = pair
    calling = asyncio.create_task(post(a, tree_request(on_early_stop="none")))
    await running_samples(a, 2)
    stop_after(engine_of(a), 3, 0)
    engine_of(a).step(5)
    await running_samples(a, 1)
    assert a.server.admission.num_samples == 4
    await drain(a)
    await running_samples(b, 1)
    assert b.server.admission.num_samples == 2
    answer = await grown(b, calling)
    assert answer["usage"]["num_samples"] == 3
    assert b.server.admission.num_samples == 0


async def test_retry_and_stream_find_a_moved_tree(pair: list[Served]) -> None:
    a, b = pair
    ids, samples = list[str](), list[int]()
    branching = Branching(mode="interval", interval=BLOCK, max_depth=2, max_leaves=4, flatten=True)

    async def read() -> None:
        async with AsyncRollouts(a.url, timeout=60) as rollouts:
            stream = rollouts.stream([PROMPT], max_tokens=100, branching=branching)
            async for record in stream:
                if record.type == "segment":
                    ids.append(record.segment.id)
                elif record.type == "sample":
                    samples.append(len(record.sample.token_ids))

    reading = asyncio.create_task(read())
    await grown_by(a, 6)
    while len(ids) < 2:
        await asyncio.sleep(0.001)
    await drain(a)
    while not reading.done():
        engine_of(b).step(STEPS)
        await asyncio.sleep(0.001)
    await reading
    assert sorted(ids) == [f"0.{i}" for i in range(6)]
    assert samples == [100] * 4


async def test_result_of_a_tree_that_is_not_fetched_yet_is_moved(pair: list[Served]) -> None:
    a, b = pair
    expected = await undisturbed(a, TREES["interval"])
    accepted = await a.http.post("/v1/rollouts", json=TREES["interval"], headers=ASYNC)
    while a.server.rollouts.num_running:
        engine_of(a).step(STEPS)
        await asyncio.sleep(0.001)
    await drain(a)
    answer = (await b.http.get(accepted.headers["location"])).json()
    assert not engine_of(b).submitted
    assert (shape(answer), rest_of(answer)) == (shape(expected), rest_of(expected))


async def test_deadline_counts_the_time_before_the_move(pair: list[Served]) -> None:
    a, b = pair
    request = tree_request(rest={"finish": {"deadline_seconds": 1.5}})
    calling = asyncio.create_task(post(a, request))
    await running_samples(a, 2)
    engine_of(a).step(5)
    await asyncio.sleep(0.5)
    await drain(a)
    await running_samples(b, 2)
    (rollout,) = b.server.rollouts.in_flight()
    (moved,) = rollout.groups
    assert moved.seconds_before >= 0.5
    answer = (await calling).json()
    (tree,) = answer["groups"]
    assert [each["finish_reason"] for each in tree["segments"]] == ["deadline"] * 2
    assert [len(each["token_ids"]) for each in tree["segments"]] == [5, 5]
    assert moved.seconds_used < 2.5


async def test_paths_are_prefilled_and_counted(pair: list[Served]) -> None:
    a, b = pair
    calling = asyncio.create_task(post(a, tree_request(prompt=list(range(1, 80)))))
    await running_samples(a, 2)
    engine_of(a).step(5)
    await drain(a)
    await running_samples(b, 2)
    await grown(b, calling)


async def test_external_tree_is_not_moved(pair: list[Served]) -> None:
    """The sender tries all rollouts at once, so it has decided when another one has moved."""
    a, b = pair
    opened = await a.http.post("/v1/rollouts", json=tree_request("external"), headers=ASYNC)
    place = opened.headers["location"]
    branching = asyncio.create_task(a.http.post(f"{place}/branch", json={"max_tokens": 20}))
    await running_samples(a, 1)
    other = asyncio.create_task(post(a, body(group(7))))
    await running_samples(a, 2)
    draining = asyncio.create_task(drain(a))
    await submitted(b, 1)
    engine_of(a).step(BLOCK)
    engine_of(b).step(4)
    assert (await branching).status_code == 200
    assert (await other).json()["outcome"] == "done"
    await a.http.get(place, params={"wait": 5})
    await draining
    assert len(engine_of(b).submitted) == 1


async def test_tree_that_is_too_large_is_not_suspended(pair: list[Served]) -> None:
    a, b = pair
    calling = asyncio.create_task(post(a, TREES["interval"]))
    await grown_by(a, 6)
    (rollout,) = a.server.rollouts.in_flight()
    size = estimated_bytes(rollout, engine_of(a))
    num_submitted = len(engine_of(a).submitted)
    await sender_of(a, max_bytes=size - 1).send_all(0.1)
    assert (len(engine_of(a).submitted), engine_of(b).submitted) == (num_submitted, [])
    await sender_of(a, max_bytes=size).send_all(30)
    await running_samples(b, 4)
    assert (await grown(b, calling))["outcome"] == "done"

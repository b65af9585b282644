"""A draining replica moves its rollouts to another one, where they continue without a loss."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from coppice import AsyncRollouts
from service.cluster.in_memory_registry import InMemoryRegistry
from service.cluster.registry import RegistryUnavailable
from tests.cluster import fleet
from tests.fake_engine import FakeEngine
from tests.service.keyfile import bearer, write_keys
from tests.service.test_rollouts import body, group, running_samples
from tests.serving import Served

pytestmark = pytest.mark.slow

PEERS: dict[str, Any] = {"peers": ["http://127.0.0.1:*"]}
PROMPT = group(1, 2, 3, n=2, seed=7)
LONG = {"sampling": {"max_tokens": 12}}
ASYNC = {"prefer": "respond-async"}
DRAIN_SECONDS = 60.0


class OneTransfer(InMemoryRegistry):
    """Registry that accepts the first transfer, and fails during the second one."""

    num_transfers = 0

    async def claim(
        self, registry_key: str, replica_id: str, *, source: str | None = None, **options: Any
    ) -> str:
        self.num_transfers += source is not None
        if source is not None and self.num_transfers == 2:
            raise RegistryUnavailable("down")
        return await super().claim(registry_key, replica_id, source=source, **options)


class Unavailable(InMemoryRegistry):
    """Registry whose transfers fail, as while Redis fails over."""

    async def claim(
        self, registry_key: str, replica_id: str, *, source: str | None = None, **options: Any
    ) -> str:
        if source is None:
            return await super().claim(registry_key, replica_id, source=source, **options)
        raise RegistryUnavailable("down")


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[list[Served]]:
    async with replicas(tmp_path, InMemoryRegistry()) as served:
        yield served


def replicas(tmp_path: Path, shared: InMemoryRegistry, number: int = 2, **sections: Any) -> Any:
    engines = [FakeEngine(instant=False, prompt_kv=True) for _ in range(number)]
    # A timeout that a busy machine does not reach.
    cluster = {"handoff_seconds": 30, **sections.pop("cluster", {})}
    return fleet(
        tmp_path, engines, lambda: shared, **{"weights": PEERS, "cluster": cluster, **sections}
    )


def engine_of(served: Served) -> FakeEngine:
    engine = served.server.engine
    assert isinstance(engine, FakeEngine)
    return engine


async def see_each_other(*replicas: Served) -> None:
    for served in (*replicas, *replicas):
        await served.server.cluster.refresh()


async def post(served: Served, request: dict[str, Any], **headers: str) -> httpx.Response:
    return await served.http.post(
        "/v1/rollouts", json=request, headers=headers, follow_redirects=True
    )


async def holder_first(b: Served, c: Served) -> tuple[Served, Served]:
    """The two replicas, first the one that runs the moved rollout."""
    while not (engine_of(b).submitted or engine_of(c).submitted):
        await asyncio.sleep(0.001)
    return (b, c) if engine_of(b).submitted else (c, b)


async def drain(served: Served) -> None:
    async with asyncio.timeout(DRAIN_SECONDS / 2):
        await served.server.drain(DRAIN_SECONDS)


async def submitted(served: Served, number: int) -> None:
    """Wait until the engine has received this many samples, those that it continues included."""
    async with asyncio.timeout(30):
        while len(engine_of(served).submitted) < number:
            await asyncio.sleep(0.001)


async def answer_after_a_refused_move(served: Served, **headers: str) -> Any:
    """Answer of a rollout of two samples that a draining replica suspends and then continues."""
    calling = asyncio.create_task(post(served, body(PROMPT, **LONG), **headers))
    await running_samples(served, 2)
    engine_of(served).step(5)
    draining = asyncio.create_task(drain(served))
    await submitted(served, 4)
    engine_of(served).step(7)
    answer = (await calling).json()
    await draining
    return answer


async def test_caller_gets_all_tokens_of_a_rollout_that_was_moved(pair: list[Served]) -> None:
    a, b = pair
    await see_each_other(a, b)
    request = body(PROMPT, group(9, n=1), **LONG)
    calling = asyncio.create_task(post(a, request))
    await running_samples(a, 3)
    engine_of(a).step(5)
    await drain(a)
    assert not calling.done()
    await running_samples(b, 3)
    engine_of(b).step(7)
    answer = (await calling).json()
    assert answer["outcome"] == "done"
    samples = [sample for each in answer["groups"] for sample in each["samples"]]
    assert [s["token_ids"] for s in samples] == [
        list(range(3, 15)),
        list(range(3, 15)),
        list(range(1, 13)),
    ]
    assert all(len(s["logprobs"]) == 12 and s["finish_reason"] == "length" for s in samples)
    assert answer["usage"]["num_generated_tokens"] == 36
    assert [each["num_continued_tokens"] for each in answer["groups"]] == [0, 0]


async def test_moved_sample_continues_its_random_stream(pair: list[Served]) -> None:
    a, b = pair
    await see_each_other(a, b)
    calling = asyncio.create_task(post(a, body(PROMPT, **LONG)))
    await running_samples(a, 2)
    engine_of(a).step(5)
    await drain(a)
    await running_samples(b, 2)
    before, after = engine_of(a).submitted, engine_of(b).submitted
    assert [each.seed for each in after] == [each.seed for each in before]
    assert [(each.num_prior_tokens, each.num_drawn_tokens) for each in after] == [(5, 5)] * 2
    engine_of(b).step(7)
    await calling


async def test_tokens_of_continue_from_are_not_counted_as_drawn(pair: list[Served]) -> None:
    a, b = pair
    await see_each_other(a, b)
    first = {
        "token_ids": [3, 4],
        "logprobs": [-1.0, -1.0],
        "versions": [{"version": "v0", "start": 0, "end": 2}],
    }
    request = body(PROMPT, **LONG, continue_from={"samples": [first]})
    calling = asyncio.create_task(post(a, request))
    await running_samples(a, 2)
    engine_of(a).step(5)
    await drain(a)
    await running_samples(b, 2)
    before, after = engine_of(a).submitted, engine_of(b).submitted
    assert [each.seed for each in after] == [each.seed for each in before]
    assert [(each.num_prior_tokens, each.num_drawn_tokens) for each in after] == [(7, 5), (5, 5)]
    engine_of(b).step(12)
    answer = (await calling).json()
    assert [len(s["token_ids"]) for s in answer["groups"][0]["samples"]] == [12, 12]
    assert answer["groups"][0]["num_continued_tokens"] == 2


async def test_finished_samples_are_neither_lost_nor_sampled_again(pair: list[Served]) -> None:
    a, b = pair
    await see_each_other(a, b)
    calling = asyncio.create_task(post(a, body(PROMPT, group(5), **LONG)))
    await running_samples(a, 3)
    running = list(engine_of(a).running.values())
    for index in (1, 2):
        running[index].limit = 4  # the second sample of the first group, and the second group
    engine_of(a).step(4)
    await drain(a)
    await running_samples(b, 1)
    engine_of(b).step(8)
    answer = (await calling).json()
    lengths = [[len(s["token_ids"]) for s in each["samples"]] for each in answer["groups"]]
    assert lengths == [[12, 4], [4]]
    assert len(engine_of(b).submitted) == 1


async def test_retry_with_the_key_gets_the_moved_rollout_from_any_replica(tmp_path: Path) -> None:
    async with replicas(tmp_path, InMemoryRegistry(), 3, weights=PEERS) as (a, b, c):
        await see_each_other(a, b, c)
        request = body(PROMPT, **LONG)
        calling = asyncio.create_task(post(a, request, **{"idempotency-key": "k"}))
        await running_samples(a, 2)
        engine_of(a).step(5)
        await drain(a)
        holder, other = await holder_first(b, c)
        metrics = (await a.http.get("/metrics")).text
        assert 'coppice_handoffs_total{kind="rollouts",outcome="moved"} 1.0' in metrics
        retries = [
            asyncio.create_task(post(each, request, **{"idempotency-key": "k"}))
            for each in (a, holder, other)
        ]
        await asyncio.sleep(0.05)
        engine_of(holder).step(7)
        answers = [(await each).json() for each in (calling, *retries)]
    assert answers[1:] == [answers[0]] * 3
    assert not engine_of(other).submitted
    assert len(answers[0]["groups"][0]["samples"][0]["token_ids"]) == 12


async def test_asynchronous_rollout_is_found_after_its_replica_has_left(tmp_path: Path) -> None:
    async with replicas(tmp_path, InMemoryRegistry(), 3) as (a, b, c):
        await see_each_other(a, b, c)
        accepted = await a.http.post("/v1/rollouts", json=body(PROMPT, **LONG), headers=ASYNC)
        await running_samples(a, 2)
        await drain(a)
        holder, other = await holder_first(b, c)
        engine_of(holder).step(12)
        await a.server.cluster.registry.leave(a.server.cluster.own_id)
        await see_each_other(b, c)
        place = accepted.headers["location"]
        answer = await other.http.get(place, params={"wait": 5}, follow_redirects=True)
    assert answer.json()["outcome"] == "done"


async def test_result_that_is_not_fetched_yet_is_moved(pair: list[Served]) -> None:
    a, b = pair
    await see_each_other(a, b)
    accepted = await a.http.post("/v1/rollouts", json=body(PROMPT), headers=ASYNC)
    await running_samples(a, 2)
    engine_of(a).step(4)
    while a.server.rollouts.num_running:
        await asyncio.sleep(0.001)
    await drain(a)
    answer = await b.http.get(accepted.headers["location"])
    assert answer.json()["outcome"] == "done"
    assert [s["token_ids"] for s in answer.json()["groups"][0]["samples"]] == [[3, 4, 5, 6]] * 2
    assert not engine_of(b).submitted


async def test_fetched_result_is_not_to_be_moved(pair: list[Served]) -> None:
    rollouts = pair[0].server.rollouts
    engine_of(pair[0]).instant = True
    accepted = await pair[0].http.post("/v1/rollouts", json=body(PROMPT), headers=ASYNC)
    while rollouts.num_running:
        await asyncio.sleep(0.001)
    (rollout,) = rollouts.results_to_move()
    assert rollouts.is_result_to_move(rollout)
    await pair[0].http.get(accepted.headers["location"])
    assert not rollouts.results_to_move()
    assert not rollouts.is_result_to_move(rollout)


async def test_client_reads_each_token_of_a_moved_stream_once(pair: list[Served]) -> None:
    a, b = pair
    await see_each_other(a, b)
    received: dict[int, list[int]] = {0: [], 1: []}
    ended = []

    async def read() -> None:
        async with AsyncRollouts(a.url, timeout=60) as rollouts:
            stream = rollouts.stream([[1, 2, 3]], n=2, seed=7, max_tokens=12, stream_tokens=True)
            async for record in stream:
                if record.type == "tokens":
                    assert record.start == len(received[record.index])
                    received[record.index] += record.token_ids
                elif record.type == "end":
                    ended.append(record)

    reading = asyncio.create_task(read())
    await running_samples(a, 2)
    engine_of(a).step(5)
    while len(received[0]) < 5 or len(received[1]) < 5:
        await asyncio.sleep(0.001)
    await drain(a)
    metrics = (await a.http.get("/metrics")).text
    assert "coppice_cluster_redirects_total 1.0" in metrics  # it may exit now
    await running_samples(b, 2)
    engine_of(b).step(3)
    while len(received[1]) < 8:
        await asyncio.sleep(0.001)
    engine_of(b).step(4)
    await reading
    assert received == {0: list(range(3, 15)), 1: list(range(3, 15))}
    assert [end.outcome for end in ended] == ["done"]


async def test_unseeded_random_selection_is_not_moved(pair: list[Served]) -> None:
    """The sender tries all rollouts at once, so it has decided when another one has moved."""
    a, b = pair
    await see_each_other(a, b)
    finish = {"num_samples": 1, "select": "random"}
    calling = asyncio.create_task(post(a, body(group(1, n=2), finish=finish, **LONG)))
    other = asyncio.create_task(post(a, body(PROMPT, **LONG)))
    await running_samples(a, 4)
    draining = asyncio.create_task(drain(a))
    await running_samples(b, 2)
    for served in (a, b):
        engine_of(served).step(12)
    assert [(await each).json()["outcome"] for each in (calling, other)] == ["done", "done"]
    await draining
    assert (len(engine_of(a).submitted), len(engine_of(b).submitted)) == (4, 2)


async def test_drain_does_not_wait_for_callers_that_have_left(pair: list[Served]) -> None:
    a, b = pair
    await see_each_other(a, b)
    request = body(PROMPT, **LONG, stream=True)
    key = {"idempotency-key": "k"}
    async with (
        httpx.AsyncClient(base_url=a.url) as http,
        http.stream("POST", "/v1/rollouts", json=request, headers=key) as response,
    ):
        lines = response.aiter_lines()
        await anext(lines)
        await running_samples(a, 2)
        await drain(a)
        assert [line async for line in lines if "end" in json.loads(line)["type"]] == []
    assert len(engine_of(b).submitted) == 2


async def test_rollout_that_no_replica_accepts_ends_where_it_is(tmp_path: Path) -> None:
    async with replicas(tmp_path, InMemoryRegistry()) as (a, b):
        await see_each_other(a, b)
        b.server.admission.close()
        answer = await answer_after_a_refused_move(a)
        metrics = (await a.http.get("/metrics")).text
    tokens = [sample["token_ids"] for sample in answer["groups"][0]["samples"]]
    assert (answer["outcome"], tokens) == ("done", [list(range(3, 15))] * 2)
    assert 'coppice_handoffs_total{kind="rollouts",outcome="kept"} 1.0' in metrics


async def test_rollout_is_not_moved_while_the_registry_does_not_respond(tmp_path: Path) -> None:
    async with replicas(tmp_path, Unavailable()) as (a, b):
        await see_each_other(a, b)
        calling = asyncio.create_task(post(a, body(PROMPT, **LONG)))
        await running_samples(a, 2)
        draining = asyncio.create_task(drain(a))
        await submitted(a, 4)
        engine_of(a).step(12)
        assert (await calling).json()["outcome"] == "done"
        await draining
        assert (b.server.rollouts.num_running, b.server.admission.num_samples) == (0, 0)


async def test_key_of_a_refused_rollout_stays_with_its_replica(tmp_path: Path) -> None:
    registry = OneTransfer()
    async with replicas(tmp_path, registry) as (a, b):
        await see_each_other(a, b)
        request = body(PROMPT, **LONG)
        calling = asyncio.create_task(post(a, request, **{"idempotency-key": "k"}))
        await running_samples(a, 2)
        draining = asyncio.create_task(drain(a))
        await submitted(a, 4)
        await see_each_other(b)  # sends the releases of the refused keys
        retry = asyncio.create_task(post(b, request, **{"idempotency-key": "k"}))
        await asyncio.sleep(0.05)
        engine_of(a).step(12)
        assert (await retry).json() == (await calling).json()
        await draining
        assert (registry.num_transfers, engine_of(b).submitted) == (3, [])


async def test_rollout_that_starts_during_the_drain_is_moved(pair: list[Served]) -> None:
    a, b = pair
    await see_each_other(a, b)
    async with a.server.rollouts.close_gate():
        calling = asyncio.create_task(post(a, body(PROMPT, **LONG)))
        while a.server.admission.is_idle:
            await asyncio.sleep(0.001)
        draining = asyncio.create_task(drain(a))
        await asyncio.sleep(0.05)
    await running_samples(b, 2)
    await draining
    engine_of(b).step(12)
    assert (await calling).json()["outcome"] == "done"


async def test_unreadable_peer_key_prevents_moves_but_not_the_drain(tmp_path: Path) -> None:
    peers = {**PEERS, "peer_key_file": tmp_path / "missing"}
    async with replicas(tmp_path, InMemoryRegistry(), weights=peers) as (a, b):
        await see_each_other(a, b)
        calling = asyncio.create_task(post(a, body(PROMPT, **LONG)))
        await running_samples(a, 2)
        draining = asyncio.create_task(drain(a))
        await asyncio.sleep(0.05)
        engine_of(a).step(12)
        assert (await calling).json()["outcome"] == "done"
        await draining
        assert engine_of(b).submitted == []


async def test_lost_rollout_is_reported_to_a_caller_that_follows_it(pair: list[Served]) -> None:
    a, b = pair
    lost = f"{a.server.cluster.own_id}.0"
    response = await b.http.post("/v1/rollouts", params={"resume": lost}, json=body(PROMPT))
    assert (response.status_code, response.json()["code"]) == (410, "replica_gone")


async def test_state_of_other_weights_or_of_another_version_is_refused(pair: list[Served]) -> None:
    a, b = pair
    codes = [
        (await b.http.post("/v1/handoff/rollouts", json=offered_state(a) | change)).json()["code"]
        for change in ({"version": "other"}, {"adapter": "a@1"}, {"state_version": 2}, {"later": 1})
    ]
    assert codes == ["version_conflict"] * 2 + ["invalid_request"] * 2
    assert b.server.admission.num_samples == 0


@pytest.mark.parametrize("kind", ["rollouts", "sessions"])
async def test_unknown_version_of_a_state_is_named_alone(pair: list[Served], kind: str) -> None:
    state = {"state_version": 7, "a_later_field": 1}
    response = await pair[1].http.post(f"/v1/handoff/{kind}", json=state)
    assert (response.status_code, response.json()["code"]) == (422, "invalid_request")
    [error] = response.json()["errors"]
    assert error["message"] == (
        "this replica reads states of version 1, and this one has version 7"
    )


def offered_state(a: Served) -> dict[str, Any]:
    replica_id = a.server.cluster.own_id
    sample = {
        "index": 0,
        "token_ids": [3],
        "logprobs": [-1.0],
        "finish_reason": "aborted",
        "versions": [{"version": "v0", "start": 0, "end": 1}],
    }
    moved = {
        "index": 0,
        "prompt_token_ids": [1, 2, 3],
        "seconds_used": 0.0,
        "elapsed_seconds": 0.0,
        "sample_seconds": [],
        "samples": [sample],
    }
    return {
        "state_version": 1,
        "id": f"{replica_id}.0",
        "source": replica_id,
        "owner": "local",
        "version": "v0",
        "awaits_fetch": True,
        "detached": True,
        "stream_tokens": False,
        "given": [],
        "request": body(group(1, 2, 3), **LONG),
        "records": [],
        "groups": [moved],
    }


@pytest.mark.parametrize(
    "change",
    [
        {"index": 1},
        {"prompt_token_ids": [1, 256]},
        {"samples": []},
    ],
)
async def test_state_that_does_not_fit_its_request_is_refused(
    pair: list[Served], change: dict[str, Any]
) -> None:
    a, b = pair
    state = offered_state(a)
    state["groups"][0] |= change
    response = await b.http.post("/v1/handoff/rollouts", json=state)
    assert (response.status_code, response.json()["code"]) == (422, "invalid_request")
    assert (b.server.rollouts.num_running, b.server.admission.num_samples) == (0, 0)
    assert len(b.server.idempotency_keys) == 0


async def test_state_is_accepted_once_and_can_be_cancelled(pair: list[Served]) -> None:
    a, b = pair
    state = offered_state(a)
    first = await b.http.post("/v1/handoff/rollouts", json=state)
    again = await b.http.post("/v1/handoff/rollouts", json=state)
    assert (first.status_code, again.status_code) == (201, 422)
    ended = [await b.http.delete(f"/v1/handoff/rollouts/{state['id']}") for _ in range(2)]
    assert [response.status_code for response in ended] == [204, 404]
    while b.server.rollouts.num_running:
        await asyncio.sleep(0.001)
    place = await b.http.get(f"/v1/rollouts/{state['id']}", follow_redirects=False)
    assert place.headers["location"].startswith(a.url)
    assert (len(b.server.idempotency_keys), b.server.idempotency_keys.held) == (0, set())
    late = await b.http.post("/v1/handoff/rollouts", json=state)
    assert late.status_code == 422


async def test_only_replicas_may_send_rollouts(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", one="rollout", two="replica")
    settings: dict[str, Any] = {"server": {"keys_file": tmp_path / "keys"}}
    async with replicas(tmp_path, InMemoryRegistry(), **settings) as (a, b):
        state = json.dumps(offered_state(a) | {"owner": "one"})
        headers = {"content-type": "application/json"}
        statuses = [
            (
                await b.http.post("/v1/handoff/rollouts", content=state, headers=headers | key)
            ).status_code
            for key in ({}, bearer(keys["one"]), bearer(keys["two"]))
        ]
        place = f"/v1/rollouts/{offered_state(a)['id']}"
        owner = await b.http.get(place, headers=bearer(keys["one"]))
    assert statuses == [401, 403, 201]
    assert owner.status_code == 202

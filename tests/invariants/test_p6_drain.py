"""P6: a drain loses no request admitted before it, in any state."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fake_engine import FakeEngine
from tests.service.sockets import raw
from tests.service.test_rollouts import body, group, running_samples
from tests.serving import Served, serving

Answering = asyncio.Task[httpx.Response]


def post(served: Served, path: str = "/v1/rollouts", asked: Any = None) -> Answering:
    asked = body(group(1, n=2)) if asked is None else asked
    return asyncio.create_task(served.http.post(path, json=asked))


def drain(served: Served, seconds: float = 30) -> "asyncio.Task[None]":
    return asyncio.create_task(served.server.drain(seconds))


async def admitted(served: Served, num_samples: int) -> None:
    while served.server.admission.num_samples != num_samples:
        await asyncio.sleep(0.001)


async def test_group_waiting_for_an_activation_is_answered(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        async with served.server.rollouts.close_gate():
            waiting = post(served)
            await admitted(served, 2)
            draining = drain(served)
            await asyncio.sleep(0.05)
            assert not draining.done()
        assert (await waiting).json()["outcome"] == "done"
        await draining


async def test_score_is_answered(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.score_gate = asyncio.Event()
    async with serving(engine, tmp_path) as served:
        item = {"prompt": {"token_ids": [1, 2]}, "responses": [[3]]}
        scoring = post(served, "/v1/score", {"items": [item]})
        await admitted(served, 1)
        draining = drain(served)
        await asyncio.sleep(0.05)
        assert not draining.done()
        engine.score_gate.set()
        assert (await scoring).status_code == 200
        await draining


async def test_frozen_sample_can_be_resumed_and_ends(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        await served.http.post("/v1/pause", json={})
        frozen = post(served)
        await running_samples(served, 2)
        draining = drain(served)
        await asyncio.sleep(0.05)
        assert (await served.http.post("/v1/resume")).json()["paused"] is False
        assert (await frozen).json()["outcome"] == "done"
        await draining


async def test_frozen_sample_returns_its_tokens_at_the_end_of_the_drain(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        frozen = post(served)
        await running_samples(served, 2)
        engine.step(3)
        await served.http.post("/v1/pause", json={})
        await drain(served, seconds=0.1)
        answer = (await frozen).json()
    assert answer["outcome"] == "cancelled"
    assert [len(s["token_ids"]) for s in answer["groups"][0]["samples"]] == [3, 3]


async def test_activation_in_mode_wait_does_not_deadlock_a_drain(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        await served.http.put("/v1/weights/v1", content=b"w")
        early = post(served)
        await running_samples(served, 2)
        activating = post(served, "/v1/weights/v1/activate", {"mode": "wait"})
        await asyncio.sleep(0.05)
        late = post(served)
        await admitted(served, 4)
        draining = drain(served)
        engine.step(4)
        assert (await early).json()["outcome"] == "done"
        assert (await activating).status_code == 200
        await running_samples(served, 2)
        engine.step(4)
        answer = (await late).json()
        await draining
    assert answer["groups"][0]["samples"][0]["versions"][0]["version"] == "v1"


async def test_group_that_could_not_start_in_time_gets_a_retryable_problem(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        async with served.server.rollouts.close_gate():
            waiting = post(served)
            await admitted(served, 2)
            await drain(served, seconds=0.05)
            refused = await waiting
        later = await post(served)
        served.server.admission.check()
    for problem in (refused, later):
        assert (problem.status_code, problem.json()["code"]) == (503, "draining")
        assert int(problem.headers["retry-after"]) > 0


ASYNC = {"prefer": "respond-async"}
NDJSON = {"accept": "application/x-ndjson"}


async def awaits_fetch(served: Served) -> str:
    """Starts an asynchronous rollout; returns the location of its answer."""
    accepted = await served.http.post("/v1/rollouts", json=body(group(1)), headers=ASYNC)
    assert accepted.status_code == 202
    place: str = accepted.headers["location"]
    return place


async def wait_until_drained(served: Served) -> None:
    while served.server.rollouts.num_running:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("headers", [{}, NDJSON])
async def test_drain_waits_for_a_promised_answer_until_it_is_fetched(
    tmp_path: Path, headers: dict[str, str]
) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        place = await awaits_fetch(served)
        await wait_until_drained(served)
        draining = drain(served)
        await asyncio.sleep(0.2)
        assert not draining.done()
        answer = await served.http.get(place, headers=headers)
        assert (answer.status_code, "done" in answer.text) == (200, True)
        async with asyncio.timeout(30):
            await draining


async def test_drain_timeout_bounds_the_wait_for_an_unfetched_answer(
    tmp_path: Path,
) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        place = await awaits_fetch(served)
        async with asyncio.timeout(30):
            await drain(served, seconds=0.2)
        assert (await served.http.get(place)).status_code == 200, "while it still listens"


async def test_drain_waits_no_longer_for_an_answer_than_its_ttl(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path, limits={"keep_answers_seconds": 0.2}) as served:
        await awaits_fetch(served)
        async with asyncio.timeout(30):
            await drain(served)


async def test_drain_does_not_wait_for_a_delivered_answer(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        asked, key = body(group(1)), {"idempotency-key": "k"}
        assert (await served.http.post("/v1/rollouts", json=asked, headers=key)).is_success
        async with asyncio.timeout(30):
            await drain(served)


async def test_disconnected_long_poll_does_not_count_as_fetched(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        place = await awaits_fetch(served)
        await running_samples(served, 1)
        request = f"GET {place}?wait=30 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
        async with raw(served) as connection:
            await connection.send(request)
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.1)
        engine.step(4)
        await wait_until_drained(served)
        draining = drain(served)
        await asyncio.sleep(0.2)
        assert not draining.done()
        assert (await served.http.get(place)).json()["outcome"] == "done"
        async with asyncio.timeout(30):
            await draining

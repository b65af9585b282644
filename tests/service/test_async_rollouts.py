"""Asynchronous rollouts, long polling, replay, idempotency keys and packed answers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from coppice.wire.packed.requests import PACKED_MEDIA_TYPE
from coppice.wire.packed.results import unpack
from tests.fake_engine import FakeEngine
from tests.service.test_rollouts import body, group, lines, running_samples
from tests.serving import Served, serving

pytestmark = pytest.mark.slow

ASYNC = {"prefer": "respond-async"}
NDJSON = {"accept": "application/x-ndjson"}


async def start(served: Served, asked: dict[str, Any], **headers: str) -> httpx.Response:
    return await served.http.post("/v1/rollouts", json=asked, headers=headers)


async def test_asynchronous_rollout_is_returned_by_a_later_get(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        accepted = await start(served, body(group(1, n=2)), **ASYNC)
        assert accepted.status_code == 202
        assert accepted.headers["preference-applied"] == "respond-async"
        place = accepted.headers["location"]
        assert place == f"/v1/rollouts/{accepted.json()['id']}"
        await running_samples(served, 2)
        early = await served.http.get(place, params={"wait": 0.05})
        assert early.status_code == 202
        assert early.json() | {"id": ""} == {
            "id": "",
            "status": "running",
            "num_samples": 2,
            "num_samples_done": 0,
        }
        waiting = asyncio.create_task(served.http.get(place, params={"wait": 30}))
        await asyncio.sleep(0.05)
        engine.step(4)
        answer = await waiting
        assert (answer.status_code, answer.json()["outcome"]) == (200, "done")
        assert (await served.http.get(place)).json() == answer.json()
        assert (await served.http.delete(place)).json() == answer.json()


@pytest.mark.parametrize(
    "prefer", [["Respond-Async"], ["wait=5", "respond-async"], ["wait=5, RESPOND-ASYNC; x=1"]]
)
async def test_prefer_header_is_parsed_in_any_case_and_from_every_line(
    tmp_path: Path, prefer: list[str]
) -> None:
    lines = [("prefer", value) for value in prefer]
    async with serving(FakeEngine(), tmp_path) as served:
        accepted = await served.http.post("/v1/rollouts", json=body(group(1)), headers=lines)
    assert (accepted.status_code, accepted.headers["preference-applied"]) == (202, "respond-async")


@pytest.mark.parametrize("seconds", ["0", "60", "60.0", "0.12345", "1e-5", "6E1"])
async def test_wait_is_any_json_number(tmp_path: Path, seconds: str) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        accepted = await start(served, body(group(1)), **ASYNC)
        query = {"wait": seconds}
        answer = await served.http.get(accepted.headers["location"], params=query)
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "query",
    [
        *(
            {"wait": wait}
            for wait in ("-1", "x", "61", "", "1e9", "nan", "1_0", " 1", "\u0661", "1\n")
        ),
        {"wait": ["1", "2"]},
        {"weight": "1"},
    ],
)
async def test_wait_query_is_a_number_of_seconds(tmp_path: Path, query: Any) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        accepted = await start(served, body(group(1)), **ASYNC)
        refused = await served.http.get(accepted.headers["location"], params=query)
    assert refused.json()["code"] == "invalid_request"
    assert [fault["location"] for fault in refused.json()["errors"]] == list(query)


async def test_stream_can_be_read_again_from_its_start(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        place = (await start(served, body(group(1, n=2)), **ASYNC)).headers["location"]
        await running_samples(served, 2)
        async with served.http.stream("GET", place, headers=NDJSON) as broken:
            assert json.loads(await anext(broken.aiter_lines()))["type"] == "start"
        await asyncio.sleep(0.05)
        assert len(engine.running) == 2, "leaving a detached rollout does not end it"
        engine.step(4)
        async with served.http.stream("GET", place, headers=NDJSON) as whole:
            records = await lines(whole)
    assert [record["type"] for record in records] == ["start", "sample", "sample", "group", "end"]


async def test_retry_attaches_to_the_running_rollout_and_gets_its_answer(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    key = {"idempotency-key": "step-1"}
    async with serving(engine, tmp_path) as served:
        asked = body(group(1, n=2))
        async with httpx.AsyncClient(base_url=served.url) as lost:
            first = asyncio.create_task(lost.post("/v1/rollouts", json=asked, headers=key))
            await running_samples(served, 2)
            first.cancel()
        await asyncio.sleep(0.05)
        assert len(engine.running) == 2, "a keyed rollout outlives its connection"
        retry = asyncio.create_task(start(served, asked, **key))
        await asyncio.sleep(0.05)
        assert len(engine.running) == 2, "a retry starts nothing"
        engine.step(4)
        answer = await retry
        assert (await start(served, asked, **key)).json() == answer.json()
        other = await start(served, body(group(9)), **key)
        assert (other.status_code, other.json()["code"]) == (422, "idempotency_mismatch")


async def test_retry_during_the_first_upload_is_asked_to_retry_later(
    tmp_path: Path,
) -> None:
    engine = FakeEngine()
    key = {"idempotency-key": "k"}
    async with serving(engine, tmp_path) as served, served.server.rollouts.close_gate():
        first = asyncio.create_task(start(served, body(group(1)), **key))
        await asyncio.sleep(0.05)
        second = await start(served, body(group(1)), **key)
        assert (second.status_code, second.json()["code"]) == (409, "idempotency_in_progress")
        first.cancel()


async def test_refusal_is_not_cached(tmp_path: Path) -> None:
    engine = FakeEngine()
    key = {"idempotency-key": "k"}
    async with serving(engine, tmp_path) as served:
        wanted = body(group(1), weights={"min_version": "v1"})
        assert (await start(served, wanted, **key)).json()["code"] == "version_unavailable"
        await served.http.put("/v1/weights/v1", content=b"w")
        await served.http.post("/v1/weights/v1/activate", json={})
        assert (await start(served, wanted, **key)).status_code == 200


async def test_retry_after_eviction_never_starts_a_second_rollout(
    tmp_path: Path,
) -> None:
    key = {"idempotency-key": "k"}
    async with serving(FakeEngine(), tmp_path, limits={"keep_answers_bytes": 0}) as served:
        assert (await start(served, body(group(1)), **key)).status_code == 200
        await asyncio.sleep(0.05)
        late = await start(served, body(group(1)), **key)
        assert (late.status_code, late.json()["code"]) == (404, "rollout_not_found")


@pytest.mark.parametrize("key", ["", "a b", "x" * 256, "\u00e9"])
async def test_idempotency_key_is_visible_ascii(tmp_path: Path, key: str) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        refused = await served.http.post(
            "/v1/rollouts",
            json=body(group(1)),
            headers=[(b"idempotency-key", key.encode("latin-1"))],
        )
    assert refused.json()["code"] == "invalid_request"


async def test_result_cache_is_bounded_in_time_and_bytes(tmp_path: Path) -> None:
    limits = {"keep_answers_seconds": 2, "keep_answers_bytes": 50_000}
    async with serving(FakeEngine(), tmp_path, limits=limits) as served:
        places = [(await start(served, body(group(1)), **ASYNC)).headers["location"] for _ in "ab"]
        await asyncio.sleep(0.05)
        assert [(await served.http.get(place)).status_code for place in places] == [200, 200]
        third = (await start(served, body(group(1)), **ASYNC)).headers["location"]
        await asyncio.sleep(0.05)
        assert (await served.http.get(places[0])).json()["code"] == "rollout_not_found"
        assert (await served.http.get(third)).status_code == 200
        await asyncio.sleep(2)
        assert (await served.http.get(third)).status_code == 404


async def test_idempotency_key_is_evicted_with_its_answer(tmp_path: Path) -> None:
    limits = {"keep_answers_seconds": 0.1}
    key = {"idempotency-key": "k"}
    async with serving(FakeEngine(), tmp_path, limits=limits) as served:
        first = await start(served, body(group(1)), **key)
        await asyncio.sleep(0.15)
        second = await start(served, body(group(1)), **key)
    assert first.json()["id"] != second.json()["id"]


async def test_packed_answer_is_equivalent_and_smaller(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        asked = {
            "groups": [group(1, n=2), group(2, 3)],
            "sampling": {"max_tokens": 200},
        }
        key = {"idempotency-key": "k"}
        plain = await start(served, asked, **key)
        packed = await start(served, asked, accept=PACKED_MEDIA_TYPE, **key)
    assert packed.headers["content-type"] == PACKED_MEDIA_TYPE
    unpacked = unpack(packed.content)
    samples = [s for g in plain.json()["groups"] for s in g["samples"]]
    for columns, sample in zip(unpacked.columns, samples, strict=True):
        assert columns.token_ids.tolist() == sample["token_ids"]
        assert columns.logprobs.tolist() == sample["logprobs"]
    assert unpacked.answer.id == plain.json()["id"]

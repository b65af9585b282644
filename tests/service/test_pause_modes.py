"""Modes of pauses: other keys' pauses stay in force, and the lease counts while samples run."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fake_engine import FakeEngine
from tests.service.keyfile import bearer, write_keys
from tests.service.test_pauses import post, until_resumed
from tests.service.test_rollouts import body, group, running_samples
from tests.service.test_weights import activate, sample, upload
from tests.serving import Served, serving


async def refusal(request: asyncio.Task[httpx.Response]) -> tuple[int, str]:
    refused = await request
    return refused.status_code, refused.json()["code"]


async def until_draining(engine: FakeEngine, call: str = "pause wait") -> None:
    async with asyncio.timeout(60):
        while call not in engine.calls:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("path", ["/v1/pause", "/v1/sleep"])
async def test_wait_is_refused_while_another_key_has_frozen_samples(
    tmp_path: Path, path: str
) -> None:
    engine = FakeEngine(instant=False)
    secrets = write_keys(tmp_path / "keys", operator="admin", trainer="admin", actor="rollout")
    async with serving(engine, tmp_path, server={"keys_file": tmp_path / "keys"}) as served:

        async def call(key: str, path: str, **asked: Any) -> httpx.Response:
            return await post(served, path, json=asked, headers=bearer(secrets[key]))

        rollout = asyncio.create_task(call("actor", "/v1/rollouts", **body(group(1, n=1))))
        await running_samples(served, 1)
        await call("operator", "/v1/pause")
        refused = await call("trainer", path, mode="wait")
        assert (refused.status_code, refused.json()["code"]) == (409, "version_conflict")
        assert engine.pause_state == "paused_all" and len(engine.running) == 1
        assert (await call("operator", "/v1/resume")).json()["paused"] is False
        engine.step(10)
        assert (await rollout).status_code == 200


async def test_abort_leaves_the_pause_of_another_key_in_mode_keep(tmp_path: Path) -> None:
    engine = FakeEngine()
    secrets = write_keys(tmp_path / "keys", operator="admin", trainer="admin")
    async with serving(engine, tmp_path, server={"keys_file": tmp_path / "keys"}) as served:
        for key, mode in (("operator", "keep"), ("trainer", "abort")):
            await post(served, "/v1/pause", json={"mode": mode}, headers=bearer(secrets[key]))
    assert engine.calls == ["pause keep", "pause abort", "pause keep"]


async def test_activation_in_mode_abort_leaves_a_pause_in_mode_keep(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        await upload(served, "v1")
        await served.http.post("/v1/pause")
        assert (await activate(served, "v1", mode="abort")).status_code == 200
        assert engine.pause_state == "paused_all"


@pytest.mark.parametrize("path", ["/v1/pause", "/v1/sleep"])
async def test_lease_ends_while_running_samples_end(tmp_path: Path, path: str) -> None:
    engine = FakeEngine(instant=False)
    engine.drains = False
    async with serving(engine, tmp_path) as served:
        rollout = asyncio.create_task(sample(served))
        await running_samples(served, 1)
        asked = {"mode": "wait", "lease_seconds": 0.05}
        pause = asyncio.create_task(served.http.post(path, json=asked))
        await until_draining(engine)
        assert (await refusal(pause)) == (409, "version_conflict")
        await until_resumed(engine)
        engine.step(10)
        assert (await rollout).json()["outcome"] == "done"
        assert engine.calls == ["pause wait", "pause keep", "resume"]


@pytest.mark.parametrize(
    ("path", "end", "asked"),
    [
        ("/v1/pause", "/v1/resume", {}),
        ("/v1/pause", "/v1/resume", {"all": True}),
        ("/v1/sleep", "/v1/wake", {}),
        ("/v1/sleep", "/v1/wake", {"all": True}),
    ],
)
async def test_pause_is_ended_while_running_samples_end(
    tmp_path: Path, path: str, end: str, asked: dict[str, Any]
) -> None:
    engine = FakeEngine(instant=False)
    engine.drains = False
    async with serving(engine, tmp_path) as served:
        rollout = asyncio.create_task(sample(served))
        await running_samples(served, 1)
        without_lease = {"mode": "wait", "lease_seconds": None}
        pause = asyncio.create_task(served.http.post(path, json=without_lease))
        await until_draining(engine)
        assert (await served.http.get("/v1/status")).json()["paused"] is True
        assert (await served.http.post(end, json=asked)).json()["paused"] is False
        assert (await refusal(pause)) == (409, "version_conflict")
        assert not engine.paused
        engine.step(10)
        assert (await rollout).json()["outcome"] == "done"


async def test_repeated_call_renews_the_lease_while_running_samples_end(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    engine.drains = False
    async with serving(engine, tmp_path) as served:
        rollout = asyncio.create_task(sample(served))
        await running_samples(served, 1)
        calls = [asyncio.create_task(_pause(served, 30.0))]
        await until_draining(engine)
        calls.append(asyncio.create_task(_pause(served, 1000.0)))
        async with asyncio.timeout(60):
            while (await _lease(served)) < 900:
                await asyncio.sleep(0.001)
        engine.step(10)
        assert [(await call).status_code for call in calls] == [200, 200]
        assert (await rollout).json()["outcome"] == "done"
        assert engine.paused and await _lease(served) > 900


async def _pause(served: Served, lease_seconds: float) -> httpx.Response:
    asked = {"mode": "wait", "lease_seconds": lease_seconds}
    return await served.http.post("/v1/pause", json=asked)


async def _lease(served: Served) -> float:
    seconds = (await served.http.get("/v1/status")).json()["pause_lease_seconds"]
    assert isinstance(seconds, float)
    return seconds


async def test_sleep_in_mode_wait_freezes_samples_that_were_submitted_meanwhile(
    tmp_path: Path,
) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        await served.http.post("/v1/sleep", json={"mode": "wait"})
        assert engine.pause_state == "paused_all"
    assert engine.calls[:3] == [
        *("pause wait", "pause keep recompute"),
        "sleep 1 kv_cache weights",
    ]

"""Leases and owners of pauses, on the native routes and on those of vLLM and SGLang."""

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.errors import EngineDead
from service.weights.pauses import Pauses
from tests.fake_engine import FakeEngine
from tests.service.keyfile import bearer, write_keys
from tests.service.test_weights import SlowLoad, activate, upload
from tests.serving import Served, serving


async def until_resumed(engine: FakeEngine) -> None:
    async with asyncio.timeout(60):
        while engine.paused:
            await asyncio.sleep(0.001)


async def post(served: Served, path: str, **options: Any) -> httpx.Response:
    """POST to any path, also to one of another server's API, which the contract lacks."""
    async with httpx.AsyncClient(base_url=served.url) as http:
        return await http.post(path, **options)


async def num_leases_ended(served: Served) -> float:
    text = (await served.http.get("/metrics")).text
    (number,) = re.findall(r"^coppice_pause_leases_ended_total (\S+)$", text, re.MULTILINE)
    return float(number)


@pytest.mark.parametrize(
    "call",
    [
        {"path": "/v1/pause", "json": {"lease_seconds": 0.01}},
        {"path": "/pause?mode=keep&lease_seconds=0.01"},
        {"path": "/pause_generation", "json": {"mode": "in_place", "lease_seconds": 0.01}},
    ],
)
async def test_sampling_resumes_when_the_lease_of_a_pause_ends(
    tmp_path: Path, call: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        assert (await post(served, **call)).status_code == 200
        await until_resumed(engine)
        status = (await served.http.get("/v1/status")).json()
        assert (status["paused"], status["pause_lease_seconds"]) == (False, None)
        assert await num_leases_ended(served) == 1
    assert engine.calls == ["pause keep", "resume"]
    assert "the pause by local has ended: its lease was not renewed" in caplog.text


async def test_pause_has_a_lease_by_default_and_none_on_request(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        leased = (await served.http.post("/v1/pause")).json()
        assert leased["paused"] is True and 100 < leased["lease_seconds"] <= 120
        unlimited = await served.http.post("/v1/pause", json={"lease_seconds": None})
        assert unlimited.json() == {"paused": True, "lease_seconds": None}
        resumed = await served.http.post("/v1/resume")
        assert resumed.json() == {"paused": False, "lease_seconds": None}
        assert await num_leases_ended(served) == 0


async def test_long_lease_is_shortened_to_the_maximum(tmp_path: Path) -> None:
    limits = {"max_lease_seconds": 5}
    async with serving(FakeEngine(), tmp_path, limits=limits) as served:
        answer = (await served.http.post("/v1/pause", json={"lease_seconds": 1e9})).json()
        assert 0 < answer["lease_seconds"] <= 5


@pytest.mark.parametrize("lease", [0, -1, 2**31, "60", True])
async def test_invalid_lease_is_refused_and_pauses_nothing(tmp_path: Path, lease: object) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        refused = await served.http.post("/v1/pause", json={"lease_seconds": lease})
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid_request")
        for text in ("0", "-1", "nan", "inf", "2147483648", "x"):
            refused = await post(served, "/pause", params={"lease_seconds": text})
            assert refused.json()["errors"][0]["location"] == "lease_seconds"
    assert engine.calls == []


async def test_resume_ends_the_pause_of_its_own_key_only(tmp_path: Path) -> None:
    engine = FakeEngine()
    secrets = write_keys(tmp_path / "keys", operator="admin", trainer="admin")
    keys = {"keys_file": tmp_path / "keys"}
    async with serving(engine, tmp_path, server=keys) as served:

        async def call(key: str, path: str, **body: Any) -> httpx.Response:
            return await post(served, path, json=body, headers=bearer(secrets[key]))

        await call("operator", "/v1/pause", lease_seconds=None)
        await call("trainer", "/pause")
        for path in ("/resume", "/continue_generation", "/v1/resume"):
            assert (await call("trainer", path)).status_code == 200
            assert engine.paused, "the operator's pause is in force"
        assert (await call("operator", "/v1/resume")).json()["paused"] is False
        await call("operator", "/v1/pause", lease_seconds=None)
        assert (await call("trainer", "/v1/resume", all=True)).json()["paused"] is False
        assert not engine.paused


async def test_activation_that_is_in_progress_at_the_end_of_a_lease_completes_first(
    tmp_path: Path,
) -> None:
    engine = SlowLoad()
    async with serving(engine, tmp_path) as served:
        await upload(served, "v1")
        await served.http.post("/v1/pause", json={"lease_seconds": 0.05})
        change = asyncio.create_task(activate(served, "v1"))
        await engine.loading.wait()
        async with asyncio.timeout(60):
            while served.server.activation.pauses.seconds_left != 0:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert engine.paused, "the weights are partly loaded"
        engine.can_load.set()
        assert (await change).status_code == 200
        await until_resumed(engine)
    assert engine.calls == ["pause keep", "pause keep", "swap v1", "resume"]


async def test_later_leases_end_after_a_resume_has_failed(tmp_path: Path) -> None:
    class Failing(FakeEngine):
        failures = 1

        async def resume(self) -> None:
            if self.failures:
                self.failures -= 1
                raise EngineDead("dead")
            await super().resume()

    engine = Failing()
    async with serving(engine, tmp_path) as served:
        await served.http.post("/v1/pause", json={"lease_seconds": 0.01})
        async with asyncio.timeout(60):
            while engine.failures:
                await asyncio.sleep(0.001)
        await served.http.post("/v1/pause", json={"lease_seconds": 0.01})
        await until_resumed(engine)


def test_table_knows_the_lease_that_ends_last() -> None:
    now = 0.0
    pauses = Pauses(FakeEngine(), lambda seconds: None, 100.0, clock=lambda: now)
    assert pauses.seconds_left is None
    pauses.put("a", "pause", 10.0)
    pauses.put("b", "pause", 20.0)
    assert pauses.seconds_left == 20.0
    pauses.put("c", "pause", None)
    assert pauses.seconds_left is None
    now = 10.0
    assert [pause.owner for pause in pauses.ended()] == ["a"] and pauses.has("a", "pause")
    pauses.remove("pause", "a")
    assert pauses.ended() == [] and not pauses.has("a", "pause")
    pauses.put("b", "pause", 20.0)
    now = 25.0
    assert pauses.ended() == [], "the lease was renewed"
    pauses.remove("pause", "c")
    assert pauses.seconds_left == 5.0
    pauses.remove("pause", None)
    assert not pauses.paused


async def test_rollouts_wait_until_all_who_hold_them_back_are_done(tmp_path: Path) -> None:
    """As when the engine wakes up during an activation."""
    async with serving(FakeEngine(), tmp_path) as served, served.server.rollouts.close_gate():
        async with served.server.rollouts.close_gate():
            pass
        request = {"groups": [{"prompt": {"token_ids": [1]}}], "sampling": {"max_tokens": 1}}
        with pytest.raises(httpx.ReadTimeout):
            await served.http.post("/v1/rollouts", json=request, timeout=1.0)

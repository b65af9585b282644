"""/v1/sleep and /v1/wake, and their spellings in vLLM and SGLang, over the fake engine."""

import asyncio
import re
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.errors import EngineDead, LoadFailed, MemoryUnavailable
from engine.types.samples import SleepTag
from tests.fake_engine import FakeEngine
from tests.service.keyfile import bearer, write_keys
from tests.service.test_pauses import post, until_resumed
from tests.service.test_rollouts import body, group, running_samples
from tests.service.test_weights import activate, sample, upload
from tests.service.weight_replication.replicas import eventually
from tests.serving import Served, serving

ALL = ["kv_cache", "weights"]
WAKE = ["wake kv_cache weights", "resume"]


async def sleep(served: Served, **asked: Any) -> httpx.Response:
    return await served.http.post("/v1/sleep", json=asked)


async def wake(served: Served, **asked: Any) -> httpx.Response:
    return await served.http.post("/v1/wake", json=asked)


async def code(served: Served, path: str, **options: Any) -> tuple[int, str]:
    refused = await post(served, path, **options)
    return refused.status_code, refused.json()["code"]


class SlowlyWakingEngine(FakeEngine):
    """Wakes once `may_wake` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.waking, self.may_wake = asyncio.Event(), asyncio.Event()

    async def wake(self, tags: AbstractSet[SleepTag]) -> str | None:
        self.waking.set()
        await self.may_wake.wait()
        return await super().wake(tags)


async def test_engine_releases_its_memory_and_allocates_it_again(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        asleep = (await sleep(served, level=2)).json()
        assert 3000 < asleep.pop("lease_seconds") <= 3600
        assert asleep == {"level": 2, "sleeping_tags": ALL, "paused": True}
        status = (await served.http.get("/v1/status")).json()
        assert (status["sleep_level"], status["sleeping_tags"]) == (2, ALL)
        assert (status["stage"], status["paused"]) == ("sleeping", True)
        ready = await served.http.get("/readyz")
        assert (ready.status_code, ready.json()["stage"]) == (200, "sleeping")
        text = (await served.http.get("/metrics")).text
        assert re.search(r"^coppice_sleep_level 2.0$", text, re.MULTILINE)
        awake = (await wake(served)).json()
        assert awake == {"level": 0, "sleeping_tags": [], "paused": False, "lease_seconds": None}
    assert engine.calls == ["pause keep recompute", "sleep 2 kv_cache weights", *WAKE]


async def test_rollouts_of_a_sleeping_engine_wait(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        early = asyncio.create_task(sample(served))
        await running_samples(served, 1)
        engine.step(2)
        await sleep(served)
        late = asyncio.create_task(served.http.post("/v1/rollouts", json=body(group(2))))
        await running_samples(served, 2)
        await wake(served)
        engine.step(4)
        for request in (early, late):
            assert (await request).json()["outcome"] == "done"


async def test_weights_are_updated_between_two_wakes(tmp_path: Path) -> None:
    """The order of calls of verl and slime: weights, update, KV cache."""
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        await upload(served, "v1")
        await sleep(served, level=2)
        refused = await activate(served, "v1")
        assert (refused.status_code, refused.json()["code"]) == (409, "asleep")
        assert (await wake(served, tags=["weights"])).json()["sleeping_tags"] == ["kv_cache"]
        assert (await activate(served, "v1")).status_code == 200
        assert engine.paused
        assert (await wake(served, tags=["kv_cache"])).json()["paused"] is False
    assert engine.calls == [
        *("pause keep recompute", "sleep 2 kv_cache weights", "wake weights"),
        *("pause keep", "swap v1", "wake kv_cache", "resume"),
    ]


async def test_engine_wakes_when_the_lease_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        await sleep(served, lease_seconds=0.01)
        await until_resumed(engine)
        assert (await sample(served)).json()["outcome"] == "done"
        text = (await served.http.get("/metrics")).text
        assert re.search(r"^coppice_pause_leases_ended_total 1.0$", text, re.MULTILINE)
    assert engine.calls[-2:] == WAKE
    assert "the sleep by local has ended: its lease was not renewed" in caplog.text


async def test_wake_without_memory_leaves_the_engine_asleep(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        await sleep(served)
        engine.wake_error = MemoryUnavailable("the wake needs 7 bytes more")
        refused = (await post(served, "/v1/wake", json={})).json()
        assert refused["code"] == "asleep" and "7 bytes more" in refused["detail"]
        status = (await served.http.get("/v1/status")).json()
        assert (status["stage"], status["paused"]) == ("sleeping", True)
        engine.wake_error = None
        assert (await wake(served)).json()["paused"] is False
        assert (await sample(served)).json()["outcome"] == "done"


async def test_wake_at_the_end_of_a_lease_waits_for_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        engine.wake_error = MemoryUnavailable("the wake needs 7 bytes more")
        await sleep(served, lease_seconds=0.01)
        await eventually(lambda: "sleeps beyond the end of its lease" in caplog.text)
        text = (await served.http.get("/metrics")).text
        assert re.search(r"^coppice_pause_leases_ended_total 1.0$", text, re.MULTILINE)
        engine.wake_error = None
        await until_resumed(engine)
        text = (await served.http.get("/metrics")).text
        assert re.search(r"^coppice_pause_leases_ended_total 1.0$", text, re.MULTILINE)


async def test_engine_is_paused_until_the_wake_at_the_end_of_a_lease_has_succeeded(
    tmp_path: Path,
) -> None:
    engine = SlowlyWakingEngine()
    async with serving(engine, tmp_path) as served:
        await sleep(served, lease_seconds=0.01)
        await engine.waking.wait()
        assert (await served.http.get("/v1/status")).json()["paused"] is True
        engine.may_wake.set()
        await until_resumed(engine)


@pytest.mark.parametrize("path", ["/v1/sleep", "/sleep?level=2", "/release_memory_occupation"])
async def test_sleep_has_the_longest_lease_by_default(tmp_path: Path, path: str) -> None:
    limits = {"max_lease_seconds": 900}
    async with serving(FakeEngine(), tmp_path, limits=limits) as served:
        assert (await post(served, path, json={})).status_code == 200
        left = (await served.http.get("/v1/status")).json()["pause_lease_seconds"]
        assert 600 < left <= 900


async def test_repeated_sleep_renews_its_lease_and_another_one_is_refused(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        await sleep(served)
        assert (await sleep(served, lease_seconds=None)).json()["lease_seconds"] is None
        assert (await sleep(served, level=2)).json()["code"] == "asleep"
        await wake(served, tags=["weights"])
        assert (await sleep(served)).json()["code"] == "asleep"
    assert [call for call in engine.calls if call.startswith("sleep")] == [
        "sleep 1 kv_cache weights"
    ]


async def test_sleep_belongs_to_its_key_and_leaves_other_pauses_in_force(tmp_path: Path) -> None:
    engine = FakeEngine()
    secrets = write_keys(tmp_path / "keys", operator="admin", trainer="admin")
    async with serving(engine, tmp_path, server={"keys_file": tmp_path / "keys"}) as served:

        async def call(key: str, path: str, **asked: Any) -> httpx.Response:
            return await post(served, path, json=asked, headers=bearer(secrets[key]))

        await call("trainer", "/v1/sleep")
        for path in ("/v1/sleep", "/v1/wake"):
            assert (await call("operator", path)).json()["code"] == "asleep"
        await call("trainer", "/v1/resume", all=True)
        assert engine.paused, "a resume does not end a sleep"
        await call("operator", "/v1/pause")
        assert (await call("trainer", "/v1/wake")).json()["paused"] is True
        assert not engine.sleeping and engine.paused
        await call("operator", "/v1/resume")
        await call("trainer", "/v1/sleep")
        assert (await call("operator", "/v1/wake", all=True)).json()["paused"] is False


async def test_refused_level_2_resumes(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        engine.sleep_error = LoadFailed("the files have changed")
        refused = await sleep(served, level=2)
        assert (refused.status_code, refused.json()["code"]) == (409, "asleep")
        assert "the files have changed" in refused.json()["detail"]
        assert not engine.paused
        assert (await served.http.get("/v1/status")).json()["paused"] is False


async def test_engine_that_cannot_wake_is_dead(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        await sleep(served)
        engine.sleep_error = EngineDead("no memory")
        failed = await wake(served)
        assert (failed.status_code, failed.json()["code"]) == (503, "engine_dead")
        assert engine.paused


async def test_engine_without_sleep_mode_refuses(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.can_sleep = False
    async with serving(engine, tmp_path) as served:
        paths = ("/v1/sleep", "/sleep", "/release_kv_cache_memory", "/release_memory_occupation")
        for path in paths:
            assert await code(served, path, json={}) == (422, "unsupported")
    assert engine.calls == []


@pytest.mark.parametrize(
    "asked", [{"level": 0}, {"level": 3}, {"tags": []}, {"tags": ["weights"]}, {"tags": ["x"]}]
)
async def test_invalid_sleep_is_refused(tmp_path: Path, asked: dict[str, Any]) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        assert (await sleep(served, **asked)).status_code == 422
        assert await code(served, "/sleep?level=3") == (422, "invalid_request")
        assert await code(served, "/wake_up?tags=x") == (422, "invalid_request")
        refused = await code(served, "/release_memory_occupation", json={"tags": ["weights"]})
        assert refused == (422, "invalid_request")
    assert engine.calls == []


async def test_adapters_are_not_loaded_into_released_memory(tmp_path: Path) -> None:
    engine = FakeEngine(max_adapters=1)
    async with serving(engine, tmp_path) as served:
        await sleep(served)
        asked = {"version": "1", "path": "/x"}
        assert await code(served, "/v1/adapters/a", json=asked) == (409, "asleep")
        upload_path = f"{served.url}/v1/adapters/a/1"
        async with httpx.AsyncClient() as http:
            assert (await http.put(upload_path, content=b"x")).json()["code"] == "asleep"


async def test_vllm_calls(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        asleep = await post(served, "/sleep?level=2&mode=wait&lease_seconds=60")
        assert asleep.json() == {"status": "sleeping", "level": 2}
        async with httpx.AsyncClient(base_url=served.url) as http:
            assert (await http.get("/is_sleeping")).json() == {"is_sleeping": True}
        woken = await post(served, "/wake_up?tags=weights")
        assert woken.json() == {"status": "sleeping", "tags": ["weights"]}
        woken = await post(served, "/wake_up")
        assert woken.json() == {"status": "awake", "tags": None}
        assert (await post(served, "/sleep?level=0&mode=keep")).json()["level"] == 0
        assert engine.paused and not engine.sleeping
        await post(served, "/wake_up?tags=scheduling")
        assert not engine.paused
    assert engine.calls == [
        *("pause wait", "pause keep recompute", "sleep 2 kv_cache weights", "wake weights"),
        *("wake kv_cache", "resume", "resume", "pause keep", "resume"),
    ]


async def test_vllm_client_releases_the_kv_cache_under_its_pause(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        await post(served, "/pause?mode=keep")
        released = await post(served, "/release_kv_cache_memory?lease_seconds=60")
        assert released.json() == {"status": "kv_cache_released"}
        assert engine.sleeping == {"kv_cache"}
        await upload(served, "v1")
        assert (await activate(served, "v1")).status_code == 200  # the weights are awake
        woken = await post(served, "/wake_up?tags=kv_cache")
        assert woken.json() == {"status": "awake", "tags": ["kv_cache"]}
        assert not engine.paused


async def test_sglang_calls(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        for tags, call in (
            (None, "sleep 2 kv_cache weights"),
            (["kv_cache", "cuda_graph"], "sleep 1 kv_cache"),
        ):
            engine.calls.clear()
            released = await post(served, "/release_memory_occupation", json={"tags": tags})
            assert released.json() == {"status": "ok"}
            await post(served, "/resume_memory_occupation", json={"tags": ["kv_cache"]})
            await post(served, "/resume_memory_occupation", json={})
            assert not engine.paused
            assert engine.calls[:3] == ["pause keep recompute", call, "wake kv_cache"]

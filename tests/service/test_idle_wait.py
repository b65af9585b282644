"""Activations in mode `wait`: no other request waits for the running samples with them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.errors import LoadFailed
from service.errors import VersionConflict
from service.weights.pauses import COMPLETION_SECONDS
from tests.fake_engine import VOCAB_SIZE, FakeEngine
from tests.service.test_rollouts import body, group, running_samples
from tests.service.test_weights import activate, until, upload
from tests.service.weight_replication.replicas import OLD
from tests.serving import Served, serving

Answer = asyncio.Task[httpx.Response]


@asynccontextmanager
async def waiting(
    folder: Path, weights: dict[str, Any] | None = None
) -> AsyncIterator[tuple[Served, FakeEngine, Answer, Answer]]:
    """An activation of v1 that waits for a sample: the server, the activation and the rollout."""
    engine = FakeEngine(instant=False)
    async with serving(engine, folder, weights=weights or {}) as served, asyncio.timeout(30):
        await upload(served, "v1")
        await upload(served, "v2")
        rollout = asyncio.create_task(served.http.post("/v1/rollouts", json=body(group(1))))
        await running_samples(served, 1)
        activation = asyncio.create_task(activate(served, "v1", mode="wait"))
        await until(lambda: served.server.activation.state == "waiting")
        yield served, engine, activation, rollout
        await activation
        engine.step(VOCAB_SIZE)
        await rollout


async def refusal(answer: Answer) -> tuple[int, str]:
    refused = await answer
    return refused.status_code, refused.json()["code"]


async def active(served: Served) -> Any:
    return (await served.http.get("/v1/weights")).json()["active"]


@pytest.mark.parametrize("mode", ["keep", "abort", "recompute"])
@pytest.mark.parametrize("version", ["v1", "v2"])
async def test_another_activation_replaces_one_that_waits(
    tmp_path: Path, version: str, mode: str
) -> None:
    async with waiting(tmp_path) as (served, engine, activation, _):
        assert (await activate(served, version, mode=mode)).status_code == 200
        assert await refusal(activation) == (409, "version_conflict")
        assert await active(served) == version
        assert len(engine.running) == (0 if mode == "abort" else 1)


async def test_activation_that_replaces_another_one_can_wait(tmp_path: Path) -> None:
    async with waiting(tmp_path) as (served, engine, activation, _):
        other = asyncio.create_task(activate(served, "v2", mode="wait"))
        assert await refusal(activation) == (409, "version_conflict")
        assert not other.done()
        engine.step(VOCAB_SIZE)
        assert (await other).status_code == 200


async def test_same_activation_joins_one_that_waits(tmp_path: Path) -> None:
    async with waiting(tmp_path) as (served, engine, activation, _):
        repeated = asyncio.create_task(activate(served, "v1", mode="wait"))
        await asyncio.sleep(0.05)
        assert not activation.done() and not repeated.done()
        engine.step(VOCAB_SIZE)
        assert (await activation).json()["previous"] == "v0"
        assert (await repeated).json()["previous"] == "v1"


async def test_repeated_activation_does_not_replace_a_later_one_that_waits(tmp_path: Path) -> None:
    async with waiting(tmp_path) as (served, engine, activation, _):
        coordinator = served.server.activation
        order = coordinator.idle_wait.request("v2", "wait")
        assert await refusal(activation) == (409, "version_conflict")
        later = asyncio.create_task(activate(served, "v1", mode="wait"))
        await until(lambda: coordinator.idle_wait.is_replaced(order))
        with pytest.raises(VersionConflict, match="'v1' in mode wait has replaced"):
            await coordinator.apply("v2", "wait", allow_rollback=True, order=order)
        assert not later.done()
        engine.step(VOCAB_SIZE)
        assert (await later).status_code == 200


async def test_activation_is_repeated_after_a_later_one_has_failed(tmp_path: Path) -> None:
    async with waiting(tmp_path) as (served, engine, activation, _):
        coordinator = served.server.activation
        order = coordinator.idle_wait.request("v2", "keep")
        assert await refusal(activation) == (409, "version_conflict")
        engine.load_error = LoadFailed("no")
        assert (await activate(served, "v1")).json()["code"] == "activation_failed"
        engine.load_error = None
        assert not coordinator.idle_wait.is_replaced(order)
        await coordinator.apply("v2", "keep", allow_rollback=True, order=order)
        assert await active(served) == "v2"


async def test_refused_activation_leaves_one_that_waits(tmp_path: Path) -> None:
    async with waiting(tmp_path) as (served, engine, activation, _):
        assert (await activate(served, "none")).status_code == 404
        assert not activation.done()
        engine.step(VOCAB_SIZE)
        assert (await activation).status_code == 200


@pytest.mark.parametrize("path", ["/v1/pause", "/v1/sleep"])
async def test_pause_that_freezes_samples_ends_the_wait(tmp_path: Path, path: str) -> None:
    async with waiting(tmp_path) as (served, _, activation, _):
        assert (await served.http.post(path, json={"mode": "keep"})).status_code == 200
        assert await refusal(activation) == (409, "version_conflict")
        assert await active(served) == "v0"
        for call in ("/v1/wake", "/v1/resume"):
            assert (await served.http.post(call)).status_code == 200


@pytest.mark.parametrize("mode", ["abort", "wait"])
async def test_pause_whose_samples_end_lets_the_activation_follow(
    tmp_path: Path, mode: str
) -> None:
    async with waiting(tmp_path) as (served, engine, activation, _):
        engine.drains = True
        assert (await served.http.post("/v1/pause", json={"mode": mode})).status_code == 200
        assert (await activation).status_code == 200
        assert engine.paused and await active(served) == "v1"
        assert (await served.http.post("/v1/resume")).status_code == 200


@pytest.mark.parametrize("path", ["/v1/pause", "/v1/sleep"])
async def test_sample_that_a_pause_in_mode_wait_freezes_ends_the_wait(
    tmp_path: Path, path: str
) -> None:
    async with waiting(tmp_path) as (served, engine, activation, _):
        (sample,) = engine.running.values()
        sample.is_held = True  # preempted, or not scheduled yet
        assert (await served.http.post(path, json={"mode": "wait"})).status_code == 200
        assert await refusal(activation) == (409, "version_conflict")
        assert await active(served) == "v0" and served.server.rollouts._gate.is_set()
        for call in ("/v1/wake", "/v1/resume"):
            assert (await served.http.post(call)).status_code == 200


async def test_activation_of_refused_files_leaves_one_that_waits(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    (shared / "step-3").mkdir(parents=True)
    (shared / "step-3" / "model.safetensors").write_bytes(OLD)
    weights = {"source_directories": (shared,)}
    async with waiting(tmp_path, weights=weights) as (served, engine, activation, _):
        staged = await served.http.post("/v1/weights/v3", json={"path": str(shared / "step-3")})
        assert staged.status_code == 201, staged.text
        engine.refused_weights["step-3"] = "changed"
        assert (await activate(served, "v3")).json()["code"] == "weights_refused"
        assert not activation.done()
        engine.step(VOCAB_SIZE)
        assert (await activation).status_code == 200


async def test_pause_that_ends_soon_does_not_end_the_wait(tmp_path: Path) -> None:
    async with waiting(tmp_path) as (served, engine, activation, _):
        (sample,) = engine.running.values()
        sample.is_held = True
        assert (await served.http.post("/v1/pause", json={"mode": "wait"})).status_code == 200
        assert (await served.http.post("/v1/resume")).status_code == 200
        await asyncio.sleep(COMPLETION_SECONDS + 0.1)
        assert not activation.done()
        engine.step(VOCAB_SIZE)
        assert (await activation).status_code == 200


async def test_weights_that_sleep_are_not_activated_after_the_wait(tmp_path: Path) -> None:
    async with waiting(tmp_path) as (served, _, activation, _):
        asked = {"mode": "abort", "level": 2}
        assert (await served.http.post("/v1/sleep", json=asked)).status_code == 200
        assert await refusal(activation) == (409, "asleep")
        assert (await served.http.post("/v1/wake")).status_code == 200
        assert await active(served) == "v0"


async def test_aborted_rollout_ends_the_wait(tmp_path: Path) -> None:
    async with waiting(tmp_path) as (served, engine, activation, _):
        await engine.abort(list(engine.running))
        assert (await activation).status_code == 200


async def test_prefix_cache_is_reset_during_the_wait(tmp_path: Path) -> None:
    async with waiting(tmp_path) as (served, engine, activation, _):
        await served.server.activation.reset_prefix_cache()
        assert not activation.done() and not engine.paused
        engine.step(VOCAB_SIZE)
        assert (await activation).status_code == 200


async def test_new_rollouts_still_wait_for_the_activation(tmp_path: Path) -> None:
    async with waiting(tmp_path) as (served, engine, activation, _):
        engine.drains = False
        await served.http.post("/v1/pause", json={"mode": "wait", "lease_seconds": 0.01})
        late = asyncio.create_task(served.http.post("/v1/rollouts", json=body(group(2))))
        await until(lambda: served.server.admission.num_samples == 2)
        await asyncio.sleep(0.05)
        assert len(engine.running) == 1
        engine.step(VOCAB_SIZE)
        assert (await activation).status_code == 200
        await running_samples(served, 1)
        engine.step(VOCAB_SIZE)
        versions = (await late).json()["groups"][0]["samples"][0]["versions"]
        assert [span["version"] for span in versions] == ["v1"]


async def test_drain_whose_time_is_up_ends_the_wait(tmp_path: Path) -> None:
    async with waiting(tmp_path) as (served, _, activation, _):
        await served.server.drain(0.05)
        assert await refusal(activation) == (503, "draining")

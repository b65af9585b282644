"""Kept KV after activations: measurements with their results, and recomputation."""

import asyncio
import json
from pathlib import Path

import pytest

from coppice import AsyncRollouts, ChainKeepKv
from engine.errors import EngineDead
from engine.feature_stats import KeptKvStats, KvDivergence
from engine.types import SampleRequest
from service.rollouts.fairness import PriorityAging
from service.weights.kept_kv_tasks import KeptKvTasks
from tests.fake_engine import FakeEngine
from tests.service.test_kept_kv import activate
from tests.service.test_rollouts import body, group
from tests.service.weight_replication.replicas import eventually
from tests.serving import serving

MEASURED = (
    KvDivergence(lag=1, kl=0.001, num_chains=4, num_tokens=64),
    KvDivergence(lag=3, kl=0.02, num_chains=1, num_tokens=16),
)


async def test_requests_of_the_chain_have_its_limits(tmp_path: Path) -> None:
    engine = FakeEngine()
    keep = ChainKeepKv(max_lag=4, max_kl=0.01)
    async with serving(engine, tmp_path) as served, AsyncRollouts(served.url) as rollouts:
        await rollouts.rollout([[1, 2, 3]], max_tokens=4, keep_kv=keep)
    [request] = engine.submitted
    assert request.kept_kv is not None
    assert (request.kept_kv.max_lag, request.kept_kv.max_kl) == (4, 0.01)


@pytest.mark.parametrize("max_kl", ["-0.1", '"0.1"', "1e400", "NaN"])
async def test_limit_is_a_finite_number_of_at_least_zero(tmp_path: Path, max_kl: str) -> None:
    text = json.dumps(body(group(1), keep_kv={"max_kl": "given"})).replace('"given"', max_kl)
    headers = {"Content-Type": "application/json"}
    async with serving(FakeEngine(), tmp_path) as served:
        answer = await served.http.post("/v1/rollouts", content=text, headers=headers)
    assert answer.status_code in (400, 422), answer.text


async def test_activation_starts_a_measurement_that_no_sample_waits_for(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served, AsyncRollouts(served.url) as rollouts:
        await activate(served, "v1", kv="keep_running")
        await rollouts.rollout([[1, 2, 3]], max_tokens=4, priority=-5)
        assert len(engine.measured) == 1
        [request] = engine.submitted
        assert isinstance(request, SampleRequest) and request.priority < engine.measured[0]
        await activate(served, "v1")  # active already
        assert len(engine.measured) == 1


async def test_next_activation_cancels_a_measurement(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.measure_gate = asyncio.Event()
    async with serving(engine, tmp_path) as served:
        await activate(served, "v1", kv="keep_running")
        await activate(served, "v2", kv="keep_running")
        assert len(engine.measured) == 2
    assert engine.num_cancelled_measurements == 2  # the last one by the stop


@pytest.mark.parametrize(
    "error", [EngineDead("dead"), RuntimeError("unexpected"), ExceptionGroup("", [OSError("both")])]
)
async def test_measurement_that_fails_does_not_stop_the_server(
    tmp_path: Path, error: Exception
) -> None:
    engine = FakeEngine()
    engine.measure_error = error
    async with serving(engine, tmp_path) as served:
        await activate(served, "v1", kv="keep_running")
        await activate(served, "v2", kv="keep_running")
        assert len(engine.measured) == 2


async def test_measurement_is_repeated_until_the_next_activation() -> None:
    engine = FakeEngine()
    probes = KeptKvTasks(engine, PriorityAging(overtaken_seconds=1), repeat_seconds=0.001)
    async with probes.running():
        probes.on_weights_changed()
        await eventually(lambda: len(engine.measured) >= 3)


async def test_kv_beyond_its_limits_is_computed_again_after_each_measurement(
    tmp_path: Path,
) -> None:
    engine = FakeEngine()
    engine.num_to_refresh = 3
    async with serving(engine, tmp_path) as served:
        assert not engine.refreshed
        await activate(served, "v1", kv="keep_running")
        await eventually(lambda: len(engine.refreshed) == 4)
        assert engine.measured == engine.refreshed  # no pause while there is something to compute


async def test_tokens_that_were_computed_again_are_counted(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.kept_stats = KeptKvStats(num_refreshed_tokens=700)
    async with serving(engine, tmp_path) as served:
        metrics = (await served.http.get("/metrics")).text
    assert "coppice_kept_kv_refreshed_tokens_total 700.0" in metrics


async def test_measured_divergences_are_listed_and_exported(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        assert (await served.http.get("/v1/weights")).json()["kv_divergences"] == []
        engine.kept_stats = KeptKvStats(divergences=MEASURED)
        listed = (await served.http.get("/v1/weights")).json()["kv_divergences"]
        metrics = (await served.http.get("/metrics")).text
        engine.kept_stats = KeptKvStats(divergences=MEASURED[:1])
        later = (await served.http.get("/metrics")).text
    assert listed[1] == {"lag": 3, "kl": 0.02, "num_chains": 1, "num_tokens": 16}
    assert 'coppice_kept_kv_divergence_nats{lag="1"} 0.001' in metrics
    assert 'coppice_kept_kv_divergence_nats{lag="3"} 0.02' in metrics
    assert 'divergence_nats{lag="1"}' in later and 'divergence_nats{lag="3"}' not in later

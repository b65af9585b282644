"""Probes, status, metrics and the served contract."""

import asyncio
from pathlib import Path

import pytest

from engine.errors import StartFailed
from engine.types.feature_stats import SharedPrefixStats
from engine.types.info import StartPhase
from service.kv.spans.index import SpanIndex
from tests.fake_engine import FakeEngine
from tests.service.test_resume import started
from tests.service.test_rollouts import body, group, running_samples
from tests.service.test_weights import activate, upload
from tests.serving import Served, serving

CONTRACT = Path(__file__).parents[2] / "openapi.yaml"


async def test_probes_answer_while_the_model_loads(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.start_gate = asyncio.Event()
    async with serving(engine, tmp_path, wait=False) as served:
        assert (await served.http.get("/livez")).json()["stage"] == "starting"
        for path in ("/readyz", "/startupz", "/health"):
            answer = await served.http.get(path)
            assert (answer.status_code, answer.json()["code"]) == (503, "not_ready")
            assert int(answer.headers["retry-after"]) >= 1
        refused = await served.http.post("/v1/rollouts", json=body(group(1)))
        assert refused.json()["code"] == "not_ready"
        status = (await served.http.get("/v1/status")).json()
        assert (status["stage"], status["engine"]) == ("starting", None)
        engine.start_gate.set()
        while (await served.http.get("/readyz")).status_code != 200:
            await asyncio.sleep(0.001)


async def test_probes_and_status_show_the_phase_of_a_start(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.start_gate = asyncio.Event()
    engine.start_phase = StartPhase(
        name="capturing CUDA graphs", seconds=45.2, num_done=3, num_total=67
    )
    async with serving(engine, tmp_path, wait=False) as served:
        detail = (await served.http.get("/readyz")).json()["detail"]
        assert detail == "the model is loading: capturing CUDA graphs, 45 s (3 of 67)"
        assert (await served.http.get("/v1/status")).json()["start_phase"] == {
            "name": "capturing CUDA graphs",
            "seconds": 45.2,
            "num_done": 3,
            "num_total": 67,
        }
        engine.start_phase = None
        assert (await served.http.get("/readyz")).json()["detail"] == "the model is loading"
        assert (await served.http.get("/v1/status")).json()["start_phase"] is None
        engine.start_gate.set()


async def test_engine_that_fails_to_start_is_not_alive(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.start_error = StartFailed("no such model")
    async with serving(engine, tmp_path, wait=False) as served:
        while (await served.http.get("/livez")).status_code == 200:
            await asyncio.sleep(0.001)


async def test_dead_engine_fails_the_probes_and_a_healthy_one_passes_them(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        engine.alive = False
        assert (await served.http.get("/livez")).status_code == 503
        assert (await served.http.get("/readyz")).status_code == 503
        engine.alive = True
        assert (await served.http.get("/livez")).status_code == 200


async def test_status_reports_engine_info(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        status = (await served.http.get("/v1/status")).json()
    assert status["weights_version"] == "v0"
    assert status["engine"]["block_size"] == 32
    assert "model_path" not in status["engine"]


async def test_metrics_count_groups_samples_tokens_and_requests(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        await served.http.post("/v1/rollouts", json=body(group(1, n=3)))
        await served.http.get("/no/such/page")
        text = (await served.http.get("/metrics")).text
    for line in (
        'coppice_groups_total{outcome="done"} 1.0',
        'coppice_groups_total{outcome="failed"} 0.0',
        'coppice_samples_total{finish_reason="length"} 3.0',
        "coppice_completion_tokens_total 12.0",
        "coppice_engine_up 1.0",
        'coppice_requests_total{code="200",route="/v1/rollouts"} 1.0',
        'coppice_requests_total{code="404",route="none"} 1.0',
    ):
        assert line in text


async def test_metrics_include_attention_counters_of_the_engine(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        text = (await served.http.get("/metrics")).text
        assert 'coppice_shared_prefix_steps_skipped_total{reason="isa"} 0.0' in text
        for steps in (3, 5):
            engine.counted = SharedPrefixStats(
                steps_grouped=steps,
                rows_grouped=8 * steps,
                prefix_bytes_not_read=1000 * steps,
                steps_skipped={"not_worth_it": steps - 1},
            )
            text = (await served.http.get("/metrics")).text
    for line in (
        "coppice_shared_prefix_steps_total 5.0",
        "coppice_shared_prefix_rows_total 40.0",
        "coppice_shared_prefix_bytes_not_read_total 5000.0",
        'coppice_shared_prefix_steps_skipped_total{reason="not_worth_it"} 4.0',
    ):
        assert line in text


async def test_metrics_count_problems_by_code(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        await served.http.get("/no/such/page")
        await served.http.get("/v1/rollouts/none")
        await served.http.get("/livez", headers={"X": "x" * 70_000})
        text = (await served.http.get("/metrics")).text
    for line in (
        'coppice_problems_total{problem="not_found"} 1.0',
        'coppice_problems_total{problem="rollout_not_found"} 1.0',
        'coppice_problems_total{problem="headers_too_large"} 1.0',
        'coppice_problems_total{problem="internal"} 0.0',
    ):
        assert line in text


async def test_metrics_report_the_state_of_the_server(tmp_path: Path) -> None:
    engine = FakeEngine()

    async def states(served: Served) -> str:
        text = (await served.http.get("/metrics")).text
        names = ("ready", "live", "draining", "paused")
        return " ".join(name for name in names if f"coppice_{name} 1.0" in text)

    async with serving(engine, tmp_path) as served:
        assert await states(served) == "ready live"
        await served.http.post("/v1/pause", json={"mode": "keep"})
        assert await states(served) == "ready live paused"
        await served.server.drain(0)
        assert await states(served) == "live draining paused"
        engine.die()
        assert await states(served) == "draining paused"


async def test_exception_after_the_engine_start_stops_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No caller waits forever, and the log has the reason."""

    def fault(self: SpanIndex) -> None:
        raise OSError("no such luck")

    monkeypatch.setattr(SpanIndex, "open", fault)
    engine = FakeEngine()
    async with serving(engine, tmp_path, wait=False) as served:
        async with asyncio.timeout(30):
            while (await served.http.get("/livez")).status_code == 200:
                await asyncio.sleep(0.01)
        assert (await served.http.get("/readyz")).status_code == 503


async def test_sample_that_ended_before_an_activation_is_not_stale(tmp_path: Path) -> None:
    """Other samples of its rollout continue under new weights."""
    engine = FakeEngine(instant=False)
    ends_soon = started(90, 91, 92)
    async with serving(engine, tmp_path) as served:
        asked = body(group(1), group(2), continue_from={"samples": [ends_soon]})
        answer = asyncio.create_task(served.http.post("/v1/rollouts", json=asked))
        await running_samples(served, 2)
        engine.step(1)
        await running_samples(served, 1)
        await upload(served, "v1")
        assert (await activate(served, "v1")).status_code == 200
        engine.step(3)
        assert (await answer).status_code == 200
        text = (await served.http.get("/metrics")).text
    assert "coppice_samples_stale_total 1.0" in text


async def test_metrics_count_stale_samples_and_stragglers(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        answer = asyncio.create_task(served.http.post("/v1/rollouts", json=body(group(1, n=2))))
        while len(engine.running) < 2:
            await asyncio.sleep(0.001)
        engine.step(2)
        engine.version = "v1"  # the state after an activation
        engine.step(2)
        await answer
        text = (await served.http.get("/metrics")).text
    assert "coppice_samples_stale_total 2.0" in text
    assert "coppice_group_duration_seconds_count 1.0" in text
    assert "coppice_group_straggler_ratio_count 1.0" in text


async def test_unknown_paths_and_methods_are_problems(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        missing = await served.http.get("/no/such/page")
        method = await served.http.patch("/v1/rollouts")
    assert (missing.status_code, missing.json()["code"]) == (404, "not_found")
    assert (method.status_code, method.json()["code"]) == (405, "method_not_allowed")
    assert missing.json()["request_id"] == missing.headers["x-request-id"]


async def test_method_not_allowed_lists_all_methods_of_the_path(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        for path, allowed in (
            ("/v1/rollouts", "POST"),
            ("/v1/rollouts/x", "DELETE, GET"),
            ("/v1/weights/v1", "DELETE, POST, PUT"),
            ("/v1/moves/sessions", "POST"),
        ):
            for method in ("PATCH", "OPTIONS", "HEAD"):
                refused = await served.http.request(method, path)
                assert (refused.status_code, refused.headers["allow"]) == (405, allowed)


async def test_contract_is_served_verbatim(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        answer = await served.http.get("/openapi.yaml")
    assert answer.content == CONTRACT.read_bytes()

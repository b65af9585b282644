"""The live page's routes and events: off by default, read-only, restricted by role, bounded."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry, Counter, Gauge

from engine.types.feature_stats import SpeculationStats
from service.app import create_app
from service.status.dashboard_snapshot import (
    INTERVAL_SECONDS,
    LOAD,
    MAX_GROUPS,
    MAX_LEASES,
    MAX_ROLLOUTS,
    MAX_ROWS,
    MAX_SAMPLES,
    Snapshots,
    engine_load,
    speculation,
)
from service.status.tree_snapshot import MAX_SPANS, spans_of
from tests.fake_engine import FakeEngine
from tests.service.keyfile import bearer, write_keys
from tests.service.prompt_kv.export_requests import export_handle
from tests.service.test_external_trees import open_tree
from tests.service.test_rollouts import body, group, running_samples
from tests.serving import Served, serving, settings_for

ON: dict[str, Any] = {"ui": True}
SCRIPTS = ("page", "charts", "rollouts", "versions")
PAGES = ("/ui", "/ui/page.css", *(f"/ui/{name}.js" for name in SCRIPTS))


def plain(served: Served) -> httpx.AsyncClient:
    """A client without contract checks: the page is not part of the contract."""
    return httpx.AsyncClient(base_url=served.url, timeout=20)


async def first_event(served: Served, **headers: str) -> dict[str, Any]:
    """A new snapshot; not the one that earlier viewers of the same second share."""
    served.app.state.snapshots = Snapshots(served.server)
    async with plain(served) as http, http.stream("GET", "/ui/events", headers=headers) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line:
                told: dict[str, Any] = json.loads(line.removeprefix("data: "))
                return told
    raise AssertionError("no event came")


async def test_dashboard_is_off_by_default(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        statuses = [(await served.http.get(p)).status_code for p in (*PAGES, "/ui/events")]
    assert statuses == [404] * 7


def test_dashboard_is_read_only(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, server={**ON, "operators_port": 0})
    operators = create_app(settings, FakeEngine()).state.operators
    routes = [r for r in operators.routes if isinstance(r, APIRoute) and r.path.startswith("/ui")]
    assert len(routes) == 7
    assert {method for route in routes for method in route.methods} == {"GET"}


async def test_page_is_public_and_its_events_need_a_role(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    keys = write_keys(file, guest="watch", trainer="rollout")
    async with (
        serving(FakeEngine(), tmp_path, server={**ON, "keys_file": file}) as served,
        plain(served) as http,
    ):
        for path in PAGES:
            answer = await http.get(path)
            assert answer.status_code == 200
            assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert (await http.get("/ui/events")).status_code == 401
        refused = await http.get("/ui/events", headers=bearer(keys["trainer"]))
        assert refused.status_code == 403
        assert (await first_event(served, **bearer(keys["guest"])))["stage"] == "serving"


async def test_events_list_running_groups_without_their_tokens(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path, server=ON) as served:
        wanted = body(group(7, 7, 7, n=3), {"prompt": {"text": "secret words"}, "n": 1})
        answer = asyncio.create_task(served.http.post("/v1/rollouts", json=wanted))
        await running_samples(served, 4)
        engine.running[next(iter(engine.running))].limit = 2
        engine.step(2)
        while len(served.server.rollouts.in_flight()[0].log.records) < 2:
            await asyncio.sleep(0.001)
        told = await first_event(served)
        engine.step(9)
        await answer
        after = await first_event(served)
    [rollout] = told["rollouts"]
    first, second = rollout["groups"]
    assert (first["n"], first["running"], first["prompt_tokens"]) == (3, 2, 3)
    spans = [{"version": "v0", "tokens": 2}]
    assert [sample["finish_reason"] for sample in first["samples"]] == ["length", None, None]
    assert all(sample["versions"] == spans for sample in first["samples"])
    assert [sample["index"] for sample in first["samples"]] == [0, 1, 2]
    assert (second["done"], len(second["samples"])) == (0, 1)
    assert told["samples"]["running"] == 3
    assert "secret" not in json.dumps(told)
    assert after["rollouts"] == []


async def test_events_are_bounded_under_any_load(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path, server=ON) as served:
        many = body(*[group(1) for _ in range(MAX_GROUPS + 6)])
        async with asyncio.TaskGroup() as tasks:
            for _ in range(MAX_ROLLOUTS + 5):
                tasks.create_task(served.http.post("/v1/rollouts", json=many))
            await running_samples(served, (MAX_ROLLOUTS + 5) * (MAX_GROUPS + 6))
            told = await first_event(served)
            engine.step(9)
    assert told["num_rollouts"] == MAX_ROLLOUTS + 5
    assert len(told["rollouts"]) == MAX_ROLLOUTS
    assert told["rollouts"][0]["num_groups"] == MAX_GROUPS + 6
    assert len(told["rollouts"][0]["groups"]) == MAX_GROUPS


async def test_events_list_a_bounded_number_of_samples(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path, server=ON) as served:
        many = body(*[group(1, n=100) for _ in range(MAX_ROWS // MAX_SAMPLES + 4)])
        answer = asyncio.create_task(served.http.post("/v1/rollouts", json=many))
        await running_samples(served, 100 * (MAX_ROWS // MAX_SAMPLES + 4))
        engine.step(1)
        for sample in list(engine.running.values())[:70]:
            sample.limit = 1
        engine.step(1)
        while served.server.rollouts.in_flight()[0].groups[0].num_running > 30:
            await asyncio.sleep(0.001)
        told = await first_event(served)
        engine.step(9)
        await answer
    groups = told["rollouts"][0]["groups"]
    assert sum(len(group["samples"]) for group in groups) == MAX_ROWS
    assert max(len(group["samples"]) for group in groups) == MAX_SAMPLES
    assert groups[-1]["samples"] == [] and groups[-1]["n"] == 100


async def test_viewers_share_one_snapshot(tmp_path: Path) -> None:
    now = 100.0
    async with serving(FakeEngine(), tmp_path, server=ON) as served:
        snapshots = Snapshots(served.server, clock=lambda: now)
        first = snapshots.latest()
        assert snapshots.latest() is first
        now += INTERVAL_SECONDS
        later = snapshots.latest()
    assert later is not first
    assert json.loads(later)["uptime_seconds"] > json.loads(first)["uptime_seconds"]


def test_versions_beyond_the_bound_are_one_span() -> None:
    spans = spans_of((f"v{i}", 2) for i in range(MAX_SPANS + 3))
    assert len(spans) == MAX_SPANS + 1
    assert spans[-1] == {"version": None, "tokens": 6}


async def test_resumed_sample_counts_the_tokens_that_it_already_had(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path, server=ON) as served:
        given = {
            "token_ids": [5, 6],
            "logprobs": [-1.0, -1.0],
            "versions": [{"version": "v9", "start": 0, "end": 2}],
        }
        wanted = body(group(1), continue_from={"samples": [given]}, sampling={"max_tokens": 9})
        answer = asyncio.create_task(served.http.post("/v1/rollouts", json=wanted))
        await running_samples(served, 1)
        engine.step(3)
        told = await first_event(served)
        engine.step(99)
        await answer
    [sample] = told["rollouts"][0]["groups"][0]["samples"]
    assert sample["tokens"] == 5
    assert [span["version"] for span in sample["versions"]] == ["v9", "v0"]


def test_engine_load_is_summed_over_engines() -> None:
    registry = CollectorRegistry()
    assert engine_load(registry) is None
    for series in LOAD:
        kind = Counter if series.endswith("_total") else Gauge
        metric = kind(series.removesuffix("_total"), "-", ["engine"], registry=registry)
        for engine, value in (("0", 0.25), ("1", 0.5)):
            metric.labels(engine).inc(value)
    load = engine_load(registry)
    assert load is not None and load.keys() == set(LOAD.values())
    assert (load["generated_tokens"], load["kv_usage"]) == (0.75, 0.5)


async def test_events_contain_the_current_tree(tmp_path: Path) -> None:
    engine = FakeEngine(prompt_kv=True)
    sections: dict[str, Any] = {"server": ON, "kv": {"capacity_bytes": 2**22}}
    async with open_tree(tmp_path, engine, sections, rest={"kv": {}}) as at:
        trunk, gone = await at.branch(n=2, max_tokens=20)
        engine.instant = False
        growing = asyncio.create_task(at.branch(segment=trunk["id"], n=2))
        while len(engine.running) < 2:  # a branch is counted before it reaches the engine
            await asyncio.sleep(0.001)
        engine.step()
        while not at.served.server.prompt_kv.status().num_handles:
            await asyncio.sleep(0.001)
        before = await first_event(at.served)
        await at.drop(gone["id"])
        after = await first_event(at.served)
        engine.step(250)
        await growing
    tree = before["rollouts"][0]["groups"][0]["tree"]
    told = {segment["id"]: segment for segment in tree["segments"]}
    assert told.keys() == {trunk["id"], gone["id"]}
    assert [told[each["id"]]["kv"] for each in (trunk, gone)] == [True, False]
    assert told[trunk["id"]]["versions"] == [{"version": "v0", "tokens": 32}]
    assert [path["parent"] for path in tree["running"]] == [trunk["id"]] * 2
    assert [path["versions"] for path in tree["running"]] == [[{"version": "v0", "tokens": 1}]] * 2
    assert all(path["tokens"] == 1 < path["limit"] for path in tree["running"])
    [left] = after["rollouts"][0]["groups"][0]["tree"]["segments"]
    assert left["id"] == trunk["id"]


async def test_events_list_the_arena_and_the_leases_that_expire_first(
    tmp_path: Path,
) -> None:
    engine = FakeEngine(prompt_kv=True)
    kv = {"capacity_bytes": 2**24}
    async with serving(engine, tmp_path, server=ON, kv=kv) as served:
        names = [
            (await export_handle(served, [n, 2, 3], lease_seconds=60 - n)).handle for n in range(9)
        ]
        engine.instant = False
        held = asyncio.create_task(export_handle(served, [99, 2, 3], lease_seconds=5))
        await running_samples(served, 2)
        engine.step()
        while served.server.prompt_kv.status().num_handles < 10:
            await asyncio.sleep(0.001)
        told = (await first_event(served))["kv"]
        for name in names:
            await served.http.delete(f"/v1/kv/{name}")
        [last] = (await first_event(served))["kv"]["leases"]
        engine.step(9)
        await held
    assert (told["reason"], told["num_handles"]) == (None, 10)
    assert told["leased_bytes"] + told["free_bytes"] == told["capacity_bytes"] == 2**24
    seconds = [lease["lease_seconds"] for lease in told["leases"]]
    assert seconds == sorted(seconds) and len(seconds) == MAX_LEASES
    assert 50 < seconds[0] <= 52
    assert (last["lease_seconds"], last["tokens"], last["version"]) == (None, 2, "v0")
    assert not any(name in json.dumps(told) for name in names), "a handle opens what it names"


def test_speculation_is_shown_once_anything_was_drafted() -> None:
    stats = SpeculationStats(version_drafted=8, version_accepted=5, gain_ratio=1.5, drafts={12: 0})
    assert speculation(stats) is None
    assert speculation(replace(stats, drafts={10: 1, 3: 4})) == {
        "acceptance": 0.625,
        "gain": 1.5,
        "drafts": [(3, 4), (10, 1)],
    }


async def test_events_end_when_the_server_drains(tmp_path: Path) -> None:
    async with (
        serving(FakeEngine(), tmp_path, server=ON) as served,
        plain(served) as http,
        http.stream("GET", "/ui/events") as answer,
    ):
        await served.server.drain(1)
        async with asyncio.timeout(20):
            async for _ in answer.aiter_lines():
                pass

"""The dashboard: off by default, read-only, its events restricted by role; browser tests."""

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from engine.feature_stats import SpeculationStats
from service.app import create_app
from service.observability.dashboard_snapshot import (
    MAX_GROUPS,
    MAX_LEASES,
    MAX_ROLLOUTS,
    speculation,
)
from tests.fake_engine import FakeEngine
from tests.service.keyfile import bearer, write_keys
from tests.service.prompt_kv.export_requests import export_handle
from tests.service.test_external_trees import open_tree
from tests.service.test_rollouts import body, group, running_samples
from tests.service.trees import tree_request
from tests.serving import Served, serving, settings_for
from tests.ui.browser import tab

ON: dict[str, Any] = {"ui": True}
PAGES = ("/ui", "/ui/page.js", "/ui/page.css")


def plain(served: Served) -> httpx.AsyncClient:
    """A client without contract checks: the page is not part of the contract."""
    return httpx.AsyncClient(base_url=served.url, timeout=20)


async def first_event(served: Served, **headers: str) -> dict[str, Any]:
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
    assert statuses == [404] * 4


def test_dashboard_is_read_only(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, server={**ON, "operators_port": 0})
    operators = create_app(settings, FakeEngine()).state.operators
    routes = [r for r in operators.routes if isinstance(r, APIRoute) and r.path.startswith("/ui")]
    assert len(routes) == 4
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
        while len(served.server.rollouts.in_flight()[0].log) < 2:
            await asyncio.sleep(0.001)
        told = await first_event(served)
        engine.step(9)
        await answer
        after = await first_event(served)
    [rollout] = told["rollouts"]
    first, second = rollout["groups"]
    assert (first["n"], first["running"], first["prompt_tokens"]) == (3, 2, 3)
    [sample] = first["ended"]
    assert (sample["tokens"], sample["versions"]) == (2, [{"version": "v0", "tokens": 2}])
    assert second["ended"] == []
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
    assert tree["growing"] == [trunk["id"]] * 2
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


@pytest.mark.slow
async def test_browser_renders_all_running_groups(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False, prompt_kv=True)
    kv = {"capacity_bytes": 2**22}
    async with serving(engine, tmp_path, server=ON, kv=kv) as served, asyncio.TaskGroup() as tasks:
        tree = tree_request(max_tokens=100, prompt=[7, 8, 9], rest={"kv": {}})
        tasks.create_task(served.http.post("/v1/rollouts", json=tree))
        await running_samples(served, 2)
        engine.step(62)
        await running_samples(served, 4)
        engine.step()
        while served.server.prompt_kv.status().num_handles < 3:
            await asyncio.sleep(0.001)
        flat = body(group(1, 2, 3, n=6), group(4, n=4))
        tasks.create_task(served.http.post("/v1/rollouts", json=flat))
        await running_samples(served, 14)
        for position, sample in enumerate(list(engine.running.values())[4:8]):
            sample.limit = position + 1
        engine.step(2)
        engine.version = "v1"  # the state after an activation
        engine.step(1)
        async with tab(f"{served.url}/ui", tmp_path / "profile") as seen:
            await seen.shown("document.querySelectorAll('.group').length == 3")
            await seen.photograph(tmp_path / "page.png")
            page = await seen.value("document.documentElement.outerHTML")
        engine.step(250)
    assert re.search(r'id="state"[^>]*>serving<', page)
    assert "group 0: 6 samples, 3 running, 3 prompt tokens" in page
    assert "group 1: 4 samples, 4 running, 1 prompt tokens" in page
    assert page.count('class="sample"') == 3
    assert page.count('class="sample running"') == 7
    assert "<polyline" in page
    assert "group 0: tree of 2 segments, 4 running paths, 3 prompt tokens" in page
    assert (page.count("<circle"), page.count('class="growing"')) == (2, 4)
    assert re.search(r"3 handles, .* 0 downloads\. Of 4\.0 MiB: leased", page)
    assert page.count("<td>not begun</td>") == 3
    assert re.search(r"<td[^>]*>v0</td><td[^>]*>0</td><td[^>]*>active</td>", page)
    assert (tmp_path / "page.png").stat().st_size > 5000


@pytest.mark.slow
async def test_browser_prompts_for_a_key_where_one_is_needed(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    keys = write_keys(file, guest="watch")
    async with (
        serving(FakeEngine(), tmp_path, server={**ON, "keys_file": file}) as served,
        tab(f"{served.url}/ui", tmp_path / "profile") as seen,
    ):
        await seen.shown("!document.getElementById('key').hidden")
        assert await seen.value("document.getElementById('state').textContent") == (
            "an API key is required"
        )
        await seen.value(f"document.getElementById('secret').value = '{keys['guest']}'")
        await seen.value("document.querySelector('button').click()")
        await seen.shown("document.getElementById('state').textContent == 'serving'")
        assert await seen.value("document.getElementById('key').hidden")

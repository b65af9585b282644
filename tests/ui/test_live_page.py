"""The live page in a browser, in each of its states.

COPPICE_PICTURES=1 writes the picture of the documentation again.
"""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from engine.types.info import EngineInfo
from tests.fake_engine import FakeEngine
from tests.service.keyfile import write_keys
from tests.service.test_rollouts import body, group, running_samples
from tests.service.test_weights import activate, upload
from tests.service.trees import tree_request
from tests.serving import Served, serving
from tests.tools import ROOT
from tests.ui.browser import Tab, tab

pytestmark = [pytest.mark.slow, pytest.mark.long]
ON: dict[str, Any] = {"ui": True}
PICTURE = ROOT / "docs" / "operate" / "live-page.png"
STATE = "document.getElementById('state').textContent"


class VllmMetrics:
    """vLLM's metrics, which the fake engine lacks, in a registry of their own."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        labels = ["engine"]
        self.generated = Counter("vllm:generation_tokens", "-", labels, registry=registry)
        self.prompt = Counter("vllm:prompt_tokens", "-", labels, registry=registry)
        self.preempted = Counter("vllm:num_preemptions", "-", labels, registry=registry)
        self.running = Gauge("vllm:num_requests_running", "-", labels, registry=registry)
        self.waiting = Gauge("vllm:num_requests_waiting", "-", labels, registry=registry)
        self.cache = Gauge("vllm:kv_cache_usage_perc", "-", labels, registry=registry)

    def update(self, engine: FakeEngine) -> None:
        tokens = [len(sample.token_versions) for sample in engine.running.values()]
        running = sum(count > 0 for count in tokens)
        self.generated.labels("0").inc(running)
        self.prompt.labels("0").inc(0)
        self.preempted.labels("0").inc(0)
        self.running.labels("0").set(running)
        self.waiting.labels("0").set(len(tokens) - running)
        self.cache.labels("0").set(min(1.0, sum(tokens) / 8000))


@dataclass(frozen=True)
class Scene:
    """A server, its engine, which samples only in `advance`, and a browser on its live page."""

    served: Served
    engine: FakeEngine
    metrics: VllmMetrics
    page: Tab
    tasks: asyncio.TaskGroup

    def post(self, request: dict[str, Any]) -> None:
        self.tasks.create_task(self.served.http.post("/v1/rollouts", json=request))

    def advance(self, num_tokens: int = 1) -> None:
        for _ in range(num_tokens):
            self.engine.step()
            self.metrics.update(self.engine)

    async def activate(self, version: str) -> None:
        await upload(self.served, version, version.encode())
        await activate(self.served, version)


@asynccontextmanager
async def scene(tmp_path: Path, engine: FakeEngine | None = None) -> AsyncIterator[Scene]:
    engine = engine or FakeEngine(instant=False, prompt_kv=True)
    metrics = VllmMetrics()
    kv = {"capacity_bytes": 2**22}
    async with serving(engine, tmp_path, server=ON, kv=kv, wait=False) as served:
        served.server.metrics.vllm_registry = metrics.registry
        metrics.update(engine)
        async with (
            tab(f"{served.url}/ui", tmp_path / "profile") as page,
            asyncio.TaskGroup() as tasks,
        ):
            yield Scene(served, engine, metrics, page, tasks)
            while engine.running:
                engine.step(300)
                await asyncio.sleep(0.01)


async def start_work(at: Scene, pace: float = 0.001) -> None:
    """Two flat groups with samples of three weights versions, and a tree with running leaves."""
    at.post(body(group(1, 2, 3, n=6), group(4, n=24), sampling={"max_tokens": 320}))
    await running_samples(at.served, 30)
    for position, sample in enumerate(at.engine.running.values()):
        if position % 3 == 0:
            sample.limit, sample.ends = 60 + 5 * position, "stop"
    await grow(at, 40, pace)
    await at.activate("step-1")
    tree = tree_request(
        max_tokens=160, prompt=[7, 8, 9], rest={"kv": {}}, max_leaves=8, max_depth=3
    )
    at.post(tree)
    await running_samples(at.served, 32)
    await grow(at, 60, pace)
    await at.activate("step-2")
    await grow(at, 40, pace)


async def grow(at: Scene, num_tokens: int, pace: float = 0.001) -> None:
    for _ in range(num_tokens):
        at.advance()
        for _ in range(4):
            await asyncio.sleep(pace / 4)


async def test_page_says_what_it_waits_for(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    engine.start_gate = asyncio.Event()
    async with scene(tmp_path, engine) as at:
        await at.page.shown(f"{STATE} == 'loading'")
        assert await at.page.text("#notice") == "The model is loading."
        assert await at.page.value("document.getElementById('content').hidden")
        engine.start_gate.set()
        await at.page.shown(f"{STATE} == 'serving'")
        assert await at.page.text("#model") == "fake"
        assert await at.page.value("document.title") == "fake - Coppice"
        assert "No rollout is running." in await at.page.text("#work")
        assert await at.page.value("document.getElementById('notice').hidden")
        assert not await at.page.value("document.getElementById('features').hidden")
        await at.page.photograph(tmp_path / "idle.png")
        await at.served.http.post("/v1/pause")
        await at.page.shown(f"{STATE} == 'paused'")


async def test_page_before_its_first_snapshot_says_that_it_connects(tmp_path: Path) -> None:
    async with scene(tmp_path) as at:
        await at.page.call("Network.setBlockedURLs", urls=["*/ui/page.js"])
        await at.page.call("Page.reload")
        await at.page.shown(f"{STATE} == 'connecting'")
        assert await at.page.text("#notice") == "Connecting to the server."
        assert await at.page.value("document.getElementById('content').hidden")
        await at.page.photograph(tmp_path / "connecting.png")


async def test_page_marks_old_data_when_the_connection_is_lost(tmp_path: Path) -> None:
    async with scene(tmp_path) as at:
        await start_work(at)
        await at.page.shown("document.querySelectorAll('.group').length == 3")
        await at.page.call("Network.emulateNetworkConditions", **conditions(offline=True))
        at.served.server.readiness.draining = True  # ends the stream
        await at.page.shown(f"{STATE} == 'connection lost'")
        assert "What is shown below is out of date." in await at.page.text("#notice")
        assert await at.page.value("document.querySelector('main.stale .group') !== null")
        await at.page.photograph(tmp_path / "lost.png")
        at.served.server.readiness.draining = False
        await at.page.call("Network.emulateNetworkConditions", **conditions(offline=False))
        await at.page.shown(f"{STATE} == 'serving'")
        assert not await at.page.value("document.querySelector('main.stale')")


def conditions(*, offline: bool) -> dict[str, Any]:
    return {
        "offline": offline,
        "latency": 0,
        "downloadThroughput": -1,
        "uploadThroughput": -1,
    }


async def test_page_shows_running_samples_and_trees_as_they_grow(tmp_path: Path) -> None:
    async with scene(tmp_path) as at:
        await start_work(at)
        await at.page.shown("document.querySelectorAll('.group').length == 3")
        await at.page.shown(f"{FIRST_ROWS}.includes('140 / 320')")
        assert await at.page.text(".rows li:nth-child(2)") == "1 140 / 320 running"
        assert await at.page.text(".rows li:nth-child(1)") == "0 60 stop"
        assert "Group 0: 6 samples, 2 finished, 3 prompt tokens" in await at.page.text("#work")
        assert "tree of 6 finished segments and 8 running paths" in await at.page.text("#work")
        before = await at.page.value(WIDTHS)
        await grow(at, 20)
        await at.page.shown(f"{FIRST_ROWS}.includes('160 / 320')")
        after = await at.page.value(WIDTHS)
        assert len(before) == len(after) == 8
        assert all(new > old for old, new in zip(before, after, strict=True))
        assert await at.page.text("#legend") == "v0 step-1 step-2"
        assert "not begun" in await at.page.text("#leases")
        assert await at.page.value("document.querySelectorAll('.kv:not([hidden])').length") == 6
        await at.page.photograph(tmp_path / "running.png")


async def test_page_shows_the_tree_of_an_agent_session_as_it_grows(tmp_path: Path) -> None:
    async with scene(tmp_path) as at:
        [start] = (await at.served.http.post("/v1/sessions", json=CREATE)).json()["sessions"]
        messages = [{"role": "user", "content": "hello"}]

        async def call() -> str:
            async with httpx.AsyncClient(base_url=at.served.url) as http:
                answer = await http.post(
                    f"{start['path']}/v1/chat/completions",
                    json={"messages": messages},
                    headers={"authorization": f"Bearer {start['key']}"},
                )
            assert answer.status_code == 200, answer.text
            content: str = answer.json()["choices"][0]["message"]["content"]
            return content

        first = asyncio.create_task(call())
        await running_samples(at.served, 1)
        await grow(at, 5)
        await at.page.shown("document.querySelectorAll('#sessions .nodes .running').length == 1")
        assert "1 running call" in await at.page.text("#sessions summary")
        at.engine.step(300)
        messages += [
            {"role": "assistant", "content": await first},
            {"role": "user", "content": "again"},
        ]
        await at.page.shown(f"{SESSION}.includes('waits for the agent')")
        second = asyncio.create_task(call())
        await running_samples(at.served, 1)
        await grow(at, 5)
        await at.page.shown("document.querySelectorAll('#sessions .nodes .running').length == 1")
        assert "1 of at most 256 turns" in await at.page.text("#sessions h3")
        assert await at.page.value("document.querySelectorAll('#sessions .context').length") == 2
        await at.page.photograph(tmp_path / "session.png")
        at.engine.step(300)
        await second
        await at.served.http.delete(f"/v1/sessions/{start['id']}")
        await at.page.shown("document.getElementById('agents').hidden")


CREATE = {"sampling": {"max_tokens": 40}}
SESSION = "document.querySelector('#sessions').innerText"
FIRST_ROWS = "document.querySelector('.rows').innerText"
WIDTHS = "[...document.querySelectorAll('.nodes .running')].map((node) => node.offsetWidth)"


async def test_tree_children_start_where_their_parent_ends(tmp_path: Path) -> None:
    edges = """[...document.querySelectorAll('.nodes li:not(.prompt)')].map((node) => {
        const box = node.getBoundingClientRect(), fork = node.children[0].getBoundingClientRect();
        return {title: node.title, left: box.left, right: box.right, y: box.top + 4, top: fork.top,
                bottom: fork.bottom}; })"""
    async with scene(tmp_path) as at:
        await start_work(at)
        await at.page.shown("document.querySelectorAll('.nodes .running').length == 8")
        nodes = await at.page.value(edges)
    ends = {}
    for node in nodes:
        found = re.match(r".*, child of (?P<parent>\S+):", node["title"])
        own = re.match(r"segment (\S+),", node["title"])
        if own is not None:
            ends[own[1]] = node
        if found is not None:
            parent = ends[found["parent"]]
            assert abs(node["left"] - parent["right"]) < 1.5
            assert node["top"] - 2 <= parent["y"] <= node["bottom"] + 2, "a line joins them"
    assert sum("child of" in node["title"] for node in nodes) == 12


async def test_page_fits_narrow_windows_and_dark_screens(tmp_path: Path) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    async with scene(tmp_path) as at:
        await start_work(at)
        await at.page.shown("document.querySelectorAll('.group').length == 3")
        await at.page.resize(400, 1400)
        assert await at.page.value(overflow) == 0
        await at.page.photograph(tmp_path / "narrow.png")
        await at.page.resize(1440, 1000)
        assert await at.page.value(overflow) == 0
        light = await at.page.value(colour)
        await at.page.prefer_dark(True)
        assert await at.page.value(colour) != light
        await at.page.photograph(tmp_path / "dark.png")


async def test_page_uses_only_its_own_origin_and_keeps_to_its_policy(tmp_path: Path) -> None:
    async with scene(tmp_path) as at:
        await start_work(at)
        await at.page.shown("document.querySelectorAll('.group').length == 3")
        assert len(at.page.requested) >= 6
        assert all(url.startswith(f"{at.served.url}/ui") for url in at.page.requested)
        assert at.page.messages == []


async def test_charts_have_axes_units_and_current_values(tmp_path: Path) -> None:
    async with scene(tmp_path) as at:
        at.post(body(group(1, n=4), sampling={"max_tokens": 400}))
        await running_samples(at.served, 4)
        await grow(at, 60, 0.04)
        await at.page.shown("document.querySelectorAll('.chart').length == 4")
        await at.page.shown("/running: 4/.test(document.getElementById('charts').innerText)")
        text = await at.page.text("#charts")
        rate = await at.page.shown("/generated: ([1-9][0-9.,]*)/.exec(document.body.innerText)[1]")
        charts = "[...document.querySelectorAll('.chart svg')]"
        labels = await at.page.value(f"{charts}.map((svg) => svg.getAttribute('aria-label'))")
    assert 0 < float(str(rate).replace(",", "")) < 10_000
    for unit in ("tokens/s", "samples", "%", "per minute", "1 min ago", "now"):
        assert unit in text
    assert "Throughput in tokens/s, last 1 minutes, axis from 0 to" in labels[0]
    assert "now running: 4, waiting: 0" in labels[1]
    assert len(labels) == 4


async def test_features_that_are_off_name_the_setting_that_changes_them(tmp_path: Path) -> None:
    async with scene(tmp_path) as at:
        await at.page.shown(f"{STATE} == 'serving'")
        features = await at.page.text("#features")
        assert "cluster off cluster.redis_url is not set cluster.redis_url" in features
        assert "dashboard on the live page is served at /ui" in features


async def test_weights_versions_have_different_colours(tmp_path: Path) -> None:
    async with scene(tmp_path) as at:
        await at.page.value(
            "import('/ui/versions.js').then(({background}) => { window.styles = "
            "Array.from({length: 1351}, (_, i) => background(i)); })"
        )
        styles = await at.page.shown("window.styles")
    assert len(set(styles)) == 1351


async def test_frozen_page_does_not_change(tmp_path: Path) -> None:
    async with scene(tmp_path) as at:
        await at.page.shown("!document.getElementById('freeze').hidden")
        await at.page.value("document.getElementById('freeze').focus()")
        await at.page.press("Enter")
        assert await at.page.value("document.getElementById('freeze').ariaPressed") == "true"
        at.post(body(group(1, n=2)))
        await running_samples(at.served, 2)
        await asyncio.sleep(2.5)
        assert await at.page.value("document.querySelectorAll('.group').length") == 0
        await at.page.press("Enter")
        await at.page.shown("document.querySelectorAll('.group').length == 1")


async def test_key_is_entered_with_the_keyboard(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    keys = write_keys(file, guest="watch", trainer="rollout")
    async with (
        serving(FakeEngine(), tmp_path, server={**ON, "keys_file": file}) as served,
        tab(f"{served.url}/ui", tmp_path / "profile") as page,
    ):
        for secret, notice in (
            (None, "This server requires an API key."),
            ("wrong", "The server did not accept this API key."),
            (keys["trainer"], "This API key lacks the role watch."),
        ):
            if secret is not None:
                await page.value(f"document.getElementById('secret').value = '{secret}'")
                await page.press("Enter")
            await page.shown(f"document.getElementById('notice').textContent == '{notice}'")
            assert await page.value("document.activeElement.id") == "secret"
            assert await page.value("document.getElementById('content').hidden")
        await page.photograph(tmp_path / "key.png")
        await page.value(f"document.getElementById('secret').value = '{keys['guest']}'")
        await page.press("Enter")
        await page.shown(f"{STATE} == 'serving'")
        assert await page.value("document.getElementById('key').hidden")


class Seedling(FakeEngine):
    """A fake engine under the name of the bundled model."""

    @property
    def info(self) -> EngineInfo:
        return replace(super().info, model="seedling")


@pytest.mark.skipif("COPPICE_PICTURES" not in os.environ, reason="writes the picture")
async def test_picture_of_the_documentation(tmp_path: Path) -> None:
    async with scene(tmp_path, Seedling(instant=False, prompt_kv=True)) as at:
        await at.page.resize(1440, 880)
        await start_work(at, pace=0.25)
        await asyncio.sleep(1.5)
        await at.page.photograph(PICTURE)

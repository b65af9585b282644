"""The routers of the vLLM and SGLang projects in front of two replicas with API keys."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.cluster.in_memory_registry import InMemoryRegistry
from tests.cluster import replica, sees
from tests.compat.programs import install
from tests.fake_engine import FakeEngine
from tests.service.cluster.routers import (
    SGLANG_ROUTER,
    VLLM_ROUTER,
    Router,
    RouterProgram,
    router,
)
from tests.service.keyfile import bearer, write_keys
from tests.serving import Served

pytestmark = pytest.mark.slow

NUM_SESSIONS = 24
COMPLETION_TOKENS = 4
COMPLETION = {"model": "fake", "prompt": "one two", "max_tokens": COMPLETION_TOKENS}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "one two"}], "max_tokens": 4}
GENERATE = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/generate": GENERATE,
}


def of_each_router(**changes: Any) -> pytest.MarkDecorator:
    vllm, sglang = (replace(program, **changes) for program in (VLLM_ROUTER, SGLANG_ROUTER))
    other = pytest.param(sglang, id="sglang-router", marks=pytest.mark.exhaustive)
    return pytest.mark.parametrize("program", [pytest.param(vllm, id="vllm-router"), other])


both = of_each_router()
prefix_aware = of_each_router(policy="cache_aware")


@dataclass(frozen=True)
class Fleet:
    """Two replicas behind a router. The first one can be closed."""

    router: Router
    replicas: list[Served]
    engines: list[FakeEngine]
    first: AsyncExitStack
    headers: dict[str, str]
    requests: list[asyncio.Task[httpx.Response]] = field(default_factory=list)

    async def post(self, path: str, body: object, session: str | None = None) -> httpx.Response:
        headers = dict(self.headers)
        if session is not None:
            headers[self.router.program.session_header] = session
        return await self.router.http.post(path, json=body, headers=headers)

    async def replica_of(self, session: str | None, prompt: str = "one two") -> int:
        """Number of the replica that receives a request."""
        before = [len(engine.submitted) for engine in self.engines]
        answer = await self.post("/v1/completions", {**COMPLETION, "prompt": prompt}, session)
        assert answer.status_code == 200, answer.text
        after = [len(engine.submitted) for engine in self.engines]
        (number,) = (n for n in range(2) if after[n] > before[n])
        return number

    async def start(self, prompt: str) -> int:
        """Starts a request that runs until `finish`. Returns the number of its replica."""
        for engine in self.engines:
            engine.instant = False
        before = [len(engine.running) for engine in self.engines]
        request = self.post("/v1/completions", {**COMPLETION, "prompt": prompt})
        self.requests.append(asyncio.create_task(request))
        async with asyncio.timeout(30):
            while (after := [len(engine.running) for engine in self.engines]) == before:
                await asyncio.sleep(0.01)
        (number,) = (n for n in range(2) if after[n] > before[n])
        return number

    async def finish(self) -> None:
        for engine in self.engines:
            engine.instant = True
            engine.step(COMPLETION_TOKENS)
        answers = await asyncio.gather(*self.requests)
        assert {answer.status_code for answer in answers} == {200}


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    install("routers")


@pytest.fixture
async def fleet(program: RouterProgram, tmp_path: Path) -> AsyncIterator[Fleet]:
    keys = tmp_path / "keys.yaml"
    secret = write_keys(keys, me="rollout")["me"]
    shared, engines = InMemoryRegistry(), [FakeEngine(), FakeEngine()]
    server: dict[str, Any] = {"keys_file": keys}
    async with AsyncExitStack() as stack, AsyncExitStack() as first:
        replicas = [
            await owner.enter_async_context(
                replica(tmp_path / str(number), engines[number], shared, server=server)
            )
            for number, owner in enumerate((first, stack))
        ]
        for served in replicas:
            await sees(served, 2)
        running = await stack.enter_async_context(router(program, tmp_path / "log", replicas))
        yield Fleet(running, replicas, engines, first, bearer(secret))


def generated(answer: httpx.Response) -> object:
    """The part of a response without ids and times."""
    body = answer.json()
    return body["choices"] if "choices" in body else body["output_ids"]


@both
async def test_sampling_routes_are_forwarded_with_their_key(fleet: Fleet) -> None:
    async with httpx.AsyncClient(base_url=fleet.replicas[0].url, headers=fleet.headers) as replica:
        for path, body in BODIES.items():
            direct, forwarded = await replica.post(path, json=body), await fleet.post(path, body)
            assert forwarded.status_code == 200, forwarded.text
            assert generated(forwarded) == generated(direct)
            stream = await fleet.post(path, {**body, "stream": True})
            assert stream.headers["content-type"].startswith("text/event-stream")
            assert stream.text.endswith("data: [DONE]\n\n")
            assert (await fleet.router.http.post(path, json=body)).status_code == 401


@both
async def test_requests_of_a_session_reach_one_replica(fleet: Fleet) -> None:
    sessions = [f"s-{number}" for number in range(NUM_SESSIONS)]
    first, second = [[await fleet.replica_of(session) for session in sessions] for _ in range(2)]
    assert first == second
    assert set(first) == {0, 1}


@prefix_aware
async def test_requests_with_a_common_prefix_reach_one_replica(fleet: Fleet) -> None:
    """The second prefix goes to the other replica, because the first one is busy."""
    prefixes = ("one two three " * 25, "uno due tre " * 25)
    first = [await fleet.start(prefix) for prefix in prefixes]
    await fleet.finish()
    assert sorted(first) == [0, 1]
    for number in range(8):
        found = [await fleet.replica_of(None, f"{prefix}{number}") for prefix in prefixes]
        assert found == first


@both
async def test_replica_that_drains_and_ends_is_avoided(fleet: Fleet) -> None:
    await fleet.replicas[0].server.drain(1)
    await fleet.router.wait_until_healthy(1)
    assert {await fleet.replica_of(f"s-{n}") for n in range(NUM_SESSIONS)} == {1}
    await fleet.first.aclose()
    assert {await fleet.replica_of(f"t-{n}") for n in range(NUM_SESSIONS)} == {1}


@both
async def test_calls_of_agent_sessions_bypass_the_router(fleet: Fleet) -> None:
    """Their base URL names the replica. Neither router forwards the key on other routes."""
    created = await fleet.replicas[0].http.post(
        "/v1/sessions", json={"n": 1}, headers=fleet.headers
    )
    (session,) = created.json()["sessions"]
    path, key = f"{session['path']}/v1/chat/completions", bearer(session["key"])
    async with httpx.AsyncClient() as agent:
        url = f"{session['base_url']}/v1/chat/completions"
        assert (await agent.post(url, json=CHAT, headers=key)).status_code == 200
    through_router = await fleet.router.http.post(path, json=CHAT, headers=key)
    expected = {VLLM_ROUTER: 401, SGLANG_ROUTER: 404}
    assert through_router.status_code == expected[fleet.router.program]

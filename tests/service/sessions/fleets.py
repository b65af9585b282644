"""Replicas with agent sessions that can be moved from one to another."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from service.cluster.in_memory_registry import InMemoryRegistry
from tests.cluster import fleet
from tests.fake_engine import FakeEngine
from tests.service.cluster.test_handoff import see_each_other
from tests.service.sessions.agents import Agent
from tests.serving import Served

PEERS: dict[str, Any] = {"peers": ["http://127.0.0.1:*"]}
LIMITED = {"sampling": {"max_tokens": 3}}
DRAIN_SECONDS = 30.0


class HeldRegistry(InMemoryRegistry):
    """Registry in which no key is transferred before `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.requested, self.gate = asyncio.Event(), asyncio.Event()

    async def claim(
        self, registry_key: str, replica_id: str, *, source: str | None = None, **options: Any
    ) -> str:
        if source is not None:
            self.requested.set()
            await self.gate.wait()
        return await super().claim(registry_key, replica_id, source=source, **options)


@asynccontextmanager
async def replicas(
    tmp_path: Path,
    number: int = 2,
    shared: InMemoryRegistry | None = None,
    *,
    instant: bool = True,
    **sections: Any,
) -> AsyncIterator[list[Served]]:
    """Replicas that see each other and accept each other's sessions."""
    registry = shared or InMemoryRegistry()
    engines = [FakeEngine(instant=instant) for _ in range(number)]
    async with fleet(
        tmp_path, engines, lambda: registry, **{"weights": PEERS, **sections}
    ) as served:
        await see_each_other(*served)
        yield served


@asynccontextmanager
async def agents_of(served: Served, **fields: Any) -> AsyncIterator[list[Agent]]:
    """New sessions of one group. Their agents follow redirects with a key in `x-api-key`.

    HTTP clients drop the header `authorization` if they are redirected to another port.
    """
    answer = await served.http.post("/v1/sessions", json={**LIMITED, **fields})
    assert answer.status_code == 200, answer.text
    async with httpx.AsyncClient(timeout=30, follow_redirects=True) as http:
        yield [
            Agent(id=start["id"], key=start["key"], url=start["base_url"], http=http)
            for start in answer.json()["sessions"]
        ]


async def call(agent: Agent, messages: list[Any], **fields: Any) -> str:
    """Text of the response to a conversation."""
    body = {"messages": messages, **fields}
    answer = await agent.post("/v1/chat/completions", body, headers={"x-api-key": agent.key})
    assert answer.status_code == 200, answer.text
    content: str = answer.json()["choices"][0]["message"]["content"]
    return content


async def drain(served: Served) -> None:
    async with asyncio.timeout(DRAIN_SECONDS):
        await served.server.drain(DRAIN_SECONDS)


async def get(served: Served, path: str, **options: Any) -> dict[str, Any]:
    """Answer to a request of the trainer, which follows redirects."""
    method = options.pop("method", "GET")
    answer = await served.http.request(method, path, follow_redirects=True, **options)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def records(served: Served, group: str, after: int = 0) -> list[dict[str, Any]]:
    """All records of a group's stream, read until it ends."""
    params = {"group": group, "after": str(after)}
    answer = await served.http.get("/v1/sessions", params=params, follow_redirects=True)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]

"""A server with agent sessions, its trainer and its agents, for tests with the fake engine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI

from service.cluster.registry import ClusterRegistry
from service.sessions.session import Session
from tests.fake_engine import FakeEngine
from tests.serving import Served, serving

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@dataclass(frozen=True)
class Agent:
    """An agent's side of a session: requests have the session's key and nothing else."""

    id: str
    key: str
    url: str
    http: httpx.AsyncClient

    def openai(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0)

    async def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.key}", **options.pop("headers", {})}
        return await self.http.post(self.url + path, json=body, headers=headers, **options)

    async def chat(self, messages: list[Any] = HELLO, **fields: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", {"messages": messages, **fields})

    async def text(self, messages: list[Any] = HELLO, **fields: Any) -> str:
        answer = await self.chat(messages, **fields)
        assert answer.status_code == 200, answer.text
        content: str = answer.json()["choices"][0]["message"]["content"]
        return content


@dataclass(frozen=True)
class Trainer:
    """The owner of sessions. Its answers are compared with the contract."""

    served: Served
    engine: Any
    http: httpx.AsyncClient

    async def create(self, headers: Any = None, **fields: Any) -> list[Agent]:
        answer = await self.served.http.post("/v1/sessions", json=fields, headers=headers)
        assert answer.status_code == 200, answer.text
        return [
            Agent(
                id=start["id"],
                key=start["key"],
                url=self.served.url + start["path"],
                http=self.http,
            )
            for start in answer.json()["sessions"]
        ]

    async def status(self, agent: Agent) -> dict[str, Any]:
        return await self._answer("GET", f"/v1/sessions/{agent.id}")

    async def tree(self, agent: Agent) -> dict[str, Any]:
        return await self._answer("GET", f"/v1/sessions/{agent.id}/tree")

    async def cancel(self, agent: Agent) -> dict[str, Any]:
        return await self._answer("DELETE", f"/v1/sessions/{agent.id}")

    async def finish(self, agent: Agent, **outcome: Any) -> dict[str, Any]:
        return await self._answer("POST", f"/v1/sessions/{agent.id}/finish", json=outcome)

    def session(self, agent: Agent) -> Session:
        return self.served.server.sessions.get(agent.id, owner="local")

    async def _answer(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        answer = await self.served.http.request(method, path, **options)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


@asynccontextmanager
async def training(
    tmp_path: Path,
    engine: FakeEngine | None = None,
    shared: ClusterRegistry | None = None,
    **sections: dict[str, Any],
) -> AsyncIterator[Trainer]:
    engine = engine or FakeEngine()
    assert engine.openai_server  # loads vLLM, before any test measures time
    async with (
        serving(engine, tmp_path, wait=True, port=0, shared=shared, **sections) as served,
        httpx.AsyncClient(timeout=30) as http,
    ):
        yield Trainer(served, engine, http)


def tokens(answer: dict[str, Any]) -> list[tuple[bool, list[int]]]:
    """Segments of the only tree of a session: sampled or context, and the token ids."""
    [group] = answer["groups"]
    return [(part.get("sampled", True), part["token_ids"]) for part in group["segments"]]

"""Agents of the sessions benchmark: their routes, tool pauses and throughput."""

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.harness.conversations import RESULT, Ask, Chat, Message
from coppice import AsyncRollouts, SessionResult

TOKENS, CONCURRENT, TURNS = 64, 12, 4
# Digits only, each of which is one token: all servers see prompts of equal lengths.
SAMPLING = {"max_tokens": TOKENS, "allowed_token_ids": list(range(17, 27))}
# The evicting prompts do not fit into the KV cache together.
PAUSE_CONTEXT, EVICTING_PROMPTS, EVICTING_TOKENS = 2000, 5, 3840


@dataclass(slots=True, kw_only=True)
class Bench:
    """The servers that are measured, and a source of unused keys of conversations."""

    model: str
    http: httpx.AsyncClient
    url: str
    rollouts: AsyncRollouts
    keys: "itertools.count[int]" = field(default_factory=itertools.count)

    def asking(self, base_url: str, key: str, record: list[dict[str, Any]]) -> Ask:
        """Asks a chat route as an agent does; `record` collects its usage, as a proxy would."""

        async def ask(messages: list[Message]) -> str:
            body = {"model": self.model, "messages": messages, **SAMPLING}
            headers = {"Authorization": f"Bearer {key}"}
            answer = await self.http.post(
                f"{base_url}/v1/chat/completions", json=body, headers=headers
            )
            answer.raise_for_status()
            record.append(answer.json())
            content: str = record[-1]["choices"][0]["message"]["content"]
            return content

        return ask

    async def session(self, play: Callable[[Ask], Awaitable[None]]) -> SessionResult:
        """Tokens of an agent that talks to a session of its own."""
        [session] = (await self.rollouts.sessions.create(sampling=SAMPLING)).sessions
        await play(self.asking(session.base_url, session.key, []))
        return await self.rollouts.sessions.finish(session.id, reward=1.0)


class Pauses:
    """Times to first token of a turn after a tool pause, in seconds.

    Other load evicts the session's KV during every second pause.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.kept: list[float] = []
        self.evicted: list[float] = []
        self._chat: Chat | None = None
        self._url, self._key = "", ""

    async def start(self) -> None:
        [session] = (await self._bench.rollouts.sessions.create(sampling=SAMPLING)).sessions
        self._url, self._key = session.base_url, session.key
        ask = self._bench.asking(self._url, self._key, [])
        self._chat = Chat.started(ask, f"pause {next(self._bench.keys)}")
        self._chat.add("user", PAUSE_CONTEXT)
        await self._chat.turn()

    async def after_kept(self) -> None:
        self.kept.append(await self._first_token())

    async def after_eviction(self) -> None:
        await self._evict()
        self.evicted.append(await self._first_token())

    async def _first_token(self) -> float:
        """Streams a turn; it is not sent back, so that all turns have prompts of equal length."""
        assert self._chat is not None
        messages = [*self._chat.messages[:-1], {"role": "user", "content": self._result()}]
        body = {"model": self._bench.model, "messages": messages, "stream": True}
        headers = {"Authorization": f"Bearer {self._key}"}
        began = time.perf_counter()
        async with self._bench.http.stream(
            "POST", f"{self._url}/v1/chat/completions", json=body, headers=headers
        ) as answer:
            first = None
            async for line in answer.aiter_lines():
                if first is None and has_content(line):
                    first = time.perf_counter() - began
        assert first is not None, "the turn has no token"
        return first

    def _result(self) -> str:
        return f"{next(self._bench.keys):08d}" * (RESULT // 8)

    async def _evict(self) -> None:
        """Fills the KV cache with prompts of other callers."""
        numbers = [next(self._bench.keys) for _ in range(EVICTING_PROMPTS)]
        prompts = [
            [17 + int(digit) for digit in f"{n:08d}" * (EVICTING_TOKENS // 8)] for n in numbers
        ]
        groups = [{"prompt": {"token_ids": prompt}} for prompt in prompts]
        body = {"groups": groups, "sampling": {"max_tokens": 1}}
        (
            await self._bench.http.post(f"{self._bench.url}/v1/rollouts", json=body)
        ).raise_for_status()


class Routes:
    """Sampled tokens per second of linear conversations, over sessions and over the chat route."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.sessions: list[float] = []
        self.chat: list[float] = []

    async def over_sessions(self) -> None:
        await self._measure(self._bench.session, self.sessions)

    async def over_chat(self) -> None:
        async def play(conversation: Callable[[Ask], Awaitable[None]]) -> None:
            await conversation(self._bench.asking(self._bench.url, "none", []))

        await self._measure(play, self.chat)

    async def _measure(
        self, play: Callable[[Callable[[Ask], Awaitable[None]]], Awaitable[object]], to: list[float]
    ) -> None:
        scripts = [self._script() for _ in range(CONCURRENT)]
        began = time.perf_counter()
        await asyncio.gather(*map(play, scripts))
        to.append(CONCURRENT * TURNS * TOKENS / (time.perf_counter() - began))

    def _script(self) -> Callable[[Ask], Awaitable[None]]:
        key = f"route {next(self._bench.keys)}"
        return lambda ask: Chat.started(ask, key).turns(TURNS)


def has_content(line: str) -> bool:
    """True if a line of a stream of chat completions has a token."""
    data = line.removeprefix("data: ")
    if not data.startswith("{"):
        return False
    return any(choice["delta"].get("content") for choice in json.loads(data)["choices"])

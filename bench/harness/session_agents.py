"""Agents of the sessions benchmark: their routes, tool pauses and throughput."""

import asyncio
import itertools
import json
import math
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
PAUSE_CONTEXT = 2000
# Other callers send one prompt each at a time. All prompts need this multiple of the KV cache.
TRAFFIC_CALLERS, TRAFFIC_TOKENS, TRAFFIC_SHARE = 3, 1920, 1.25


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


class PausedAgent:
    """An agent with a long conversation, whose turns after a tool pause are timed."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._chat: Chat | None = None
        self._url, self._key = "", ""
        self._num_prompts = 0

    async def start(self) -> None:
        [session] = (await self._bench.rollouts.sessions.create(sampling=SAMPLING)).sessions
        self._url, self._key = session.base_url, session.key
        ask = self._bench.asking(self._url, self._key, [])
        self._chat = Chat.started(ask, f"pause {next(self._bench.keys)}")
        self._chat.add("user", PAUSE_CONTEXT)
        await self._chat.turn()
        engine = (await self._bench.http.get(f"{self._bench.url}/v1/status")).json()["engine"]
        num_tokens = TRAFFIC_SHARE * engine["num_blocks"] * engine["block_size"]
        self._num_prompts = math.ceil(num_tokens / (TRAFFIC_CALLERS * TRAFFIC_TOKENS))

    async def first_token(self) -> float:
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

    async def other_traffic(self) -> float:
        """Tokens per second of other callers, whose prompts need more than the whole KV cache."""
        began = time.perf_counter()
        await asyncio.gather(*(self._call() for _ in range(TRAFFIC_CALLERS)))
        num_tokens = TRAFFIC_CALLERS * self._num_prompts * TRAFFIC_TOKENS
        return num_tokens / (time.perf_counter() - began)

    async def _call(self) -> None:
        """Sends prompts of one caller in turn."""
        for _ in range(self._num_prompts):
            digits = f"{next(self._bench.keys):08d}" * (TRAFFIC_TOKENS // 8)
            prompt = {"token_ids": [17 + int(digit) for digit in digits]}
            body = {"groups": [{"prompt": prompt}], "sampling": {"max_tokens": 1}}
            answer = await self._bench.http.post(f"{self._bench.url}/v1/rollouts", json=body)
            answer.raise_for_status()


class Pauses:
    """Times to first token of turns after a tool pause, in seconds.

    `kept`: there are no other requests during the pause. During the others, other callers need the
    whole KV cache: on the server that retains KV of sessions, and on one that does not. Throughputs
    are those of the other callers, in tokens per second.
    """

    def __init__(self, retaining: Bench, plain: Bench) -> None:
        self._retaining, self._plain = PausedAgent(retaining), PausedAgent(plain)
        self.kept: list[float] = []
        self.retained: list[float] = []
        self.evicted: list[float] = []
        self.retaining_throughput: list[float] = []
        self.plain_throughput: list[float] = []

    async def start(self) -> None:
        await self._retaining.start()
        await self._plain.start()

    async def after_kept(self) -> None:
        self.kept.append(await self._retaining.first_token())

    async def after_retention(self) -> None:
        self.retaining_throughput.append(await self._retaining.other_traffic())
        self.retained.append(await self._retaining.first_token())

    async def after_eviction(self) -> None:
        self.plain_throughput.append(await self._plain.other_traffic())
        self.evicted.append(await self._plain.first_token())


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

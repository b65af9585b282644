"""Agents that do everything wrong at once, beside one that works: it loses nothing."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import httpx

from tests.fake_engine import FakeEngine
from tests.service.keyfile import bearer
from tests.service.sessions.agents import HELLO, Agent, Trainer, tokens, training
from tests.service.sessions.test_limits import until_no_calls, until_running

MEBIBYTE = 2**20
SHORT: dict[str, Any] = {"sampling": {"max_tokens": 3}}
NESTED = b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def huge_tools(num_mebibytes: int) -> list[Any]:
    """One tool whose schema has many properties with long names."""
    names = {f"{number:0>1000}": {"type": "string"} for number in range(1000 * num_mebibytes)}
    schema = {"type": "object", "properties": names}
    return [{"type": "function", "function": {"name": "t", "parameters": schema}}]


async def send(agent: Agent, content: bytes) -> int:
    headers = {**bearer(agent.key), "content-type": "application/json"}
    answer = await agent.http.post(
        f"{agent.url}/v1/chat/completions", content=content, headers=headers
    )
    return answer.status_code


async def works(agent: Agent, num_turns: int = 5) -> None:
    """A conversation, in which every call must be answered at the first attempt."""
    messages = list(HELLO)
    for _ in range(num_turns):
        text = await agent.text(messages)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]


async def check_tree(trainer: Trainer, agent: Agent, num_turns: int = 5) -> None:
    answer = await trainer.finish(agent, reward=1.0)
    sampled = [ids for is_sampled, ids in tokens(answer) if is_sampled]
    assert len(sampled) == num_turns and all(len(ids) == 3 for ids in sampled)


async def test_deep_and_large_bodies_cost_others_nothing(tmp_path: Path) -> None:
    tools = json.dumps({"messages": HELLO, "tools": huge_tools(1)}).encode()
    async with training(tmp_path, limits={"max_body_bytes": 4 * MEBIBYTE}) as trainer:
        bad, good = await trainer.create(**SHORT, n=2)
        attacks = [
            *(asyncio.create_task(send(bad, NESTED)) for _ in range(8)),
            *(asyncio.create_task(send(bad, b"[" * (5 * MEBIBYTE))) for _ in range(4)),
            *(asyncio.create_task(send(bad, tools)) for _ in range(16)),
        ]
        await works(good)
        statuses = {await attack for attack in attacks}
        assert statuses <= {200, 400, 413, 422, 429, 503} and {400, 413} <= statuses
        await check_tree(trainer, good)


async def stepping(engine: FakeEngine) -> None:
    while True:
        engine.step(250)
        await asyncio.sleep(0.001)  # the server writes as fast


async def stream_and_not_read(agent: Agent, reader: socket.socket, **asked: bool) -> None:
    url = httpx.URL(agent.url)
    body = json.dumps({"messages": HELLO, "stream": True, **asked}).encode()
    head = (
        f"POST {url.path}/v1/chat/completions HTTP/1.1\r\nhost: {url.netloc.decode()}\r\n"
        f"authorization: Bearer {agent.key}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader.setblocking(False)
    await loop.sock_connect(reader, (url.host, url.port))
    await loop.sock_sendall(reader, head.encode() + body)


async def test_stream_that_is_never_read_ends_with_its_tokens(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False, max_context_tokens=2**21)
    limits = {"write_seconds": 0.2}
    async with training(tmp_path, engine, limits=limits) as trainer, asyncio.TaskGroup() as tasks:
        [bad] = await trainer.create(sampling={"max_tokens": 1_000_000})
        [good] = await trainer.create(**SHORT)
        with socket.socket() as reader:
            await stream_and_not_read(bad, reader, return_token_ids=True)
            await until_running(engine)
            steps = tasks.create_task(stepping(engine))
            await works(good)
            await until_no_calls(trainer, bad)
            steps.cancel()
        await check_tree(trainer, good)
        [turn] = (answer := await trainer.finish(bad))["turns"]
    assert turn["finish_reason"] == "aborted"
    [(is_sampled, ids)] = tokens(answer)
    assert is_sampled and 500 <= len(ids) < 1_000_000


async def test_session_moves_only_after_its_agent_has_received_the_response(
    tmp_path: Path,
) -> None:
    engine = FakeEngine(instant=False, max_context_tokens=2**17)
    async with training(tmp_path, engine, limits={"write_seconds": 120}) as trainer:
        [agent] = await trainer.create(sampling={"max_tokens": 100_000})
        session = trainer.session(agent)
        with socket.socket() as reader:
            await stream_and_not_read(agent, reader, logprobs=True)
            await until_running(engine)
            while engine.running:
                engine.step(500)
                await asyncio.sleep(0)
            await until_no_calls(trainer, agent)
            assert not session.calls and not session.can_move
        async with asyncio.timeout(20):
            while not session.can_move:
                await asyncio.sleep(0.01)


async def test_thousands_of_sessions_that_do_nothing_cost_others_nothing(tmp_path: Path) -> None:
    async with training(tmp_path, sessions={"max_open": 4000}) as trainer:
        [good] = await trainer.create(**SHORT)
        idle = [agent for _ in range(3) for agent in await trainer.create(**SHORT, n=1024)]
        body = {**SHORT, "n": 1024}
        refused = await trainer.served.http.post("/v1/sessions", json=body)
        assert (refused.status_code, refused.json()["code"]) == (503, "overloaded")
        await works(good)
        await check_tree(trainer, good)
        await trainer.cancel(idle[0])
        assert len(await trainer.create(**SHORT, n=1)) == 1

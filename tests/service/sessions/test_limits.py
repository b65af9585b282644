"""Limits, lifetimes and access of agent sessions; agents that misbehave."""

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from engine.types.chat import ChatRequest
from service.cluster.in_memory_registry import InMemoryRegistry
from service.sessions.history import Conversations
from tests.fake_engine import FakeEngine
from tests.service.keyfile import bearer, write_keys
from tests.service.sessions.agents import HELLO, Agent, Trainer, tokens, training

LIMITED: dict[str, Any] = {"sampling": {"max_tokens": 3}}
LONG: dict[str, Any] = {"sampling": {"max_tokens": 400}}


class SlowTemplate(FakeEngine):
    """Blocks in the chat template until `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def encode_chat(self, chat_request: ChatRequest) -> list[int]:
        assert self.go.wait(30)
        return super().encode_chat(chat_request)


async def until_running(engine: FakeEngine, number: int = 1) -> None:
    async with asyncio.timeout(120):
        while len(engine.running) < number:
            await asyncio.sleep(0.001)


async def until_no_calls(trainer: Trainer, agent: Agent) -> None:
    async with asyncio.timeout(20):
        while (await trainer.status(agent))["num_running_calls"]:
            await asyncio.sleep(0.005)


async def test_key_of_a_session_is_accepted_by_its_agent_routes_only(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        one, other = await trainer.create(**LIMITED, n=2)
        foreign = await one.chat(headers=None)
        assert foreign.status_code == 200
        for headers in ({}, bearer(other.key), bearer("none"), {"x-api-key": other.key}):
            path = f"{one.url}/v1/chat/completions"
            refused = await trainer.http.post(path, json={"messages": HELLO}, headers=headers)
            assert refused.status_code == 401
        named = await trainer.http.post(
            path, json={"messages": HELLO, "max_tokens": 1}, headers={"x-api-key": one.key}
        )
        assert named.status_code == 200


async def test_keys_of_the_server_and_of_sessions_do_not_replace_each_other(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    secrets = write_keys(file, trainer="rollout", other="rollout", operator="admin")
    async with training(tmp_path, server={"keys_file": file}) as trainer:
        [agent] = await trainer.create(bearer(secrets["trainer"]), **LIMITED)
        assert (await agent.chat()).status_code == 200
        chat = f"{agent.url}/v1/chat/completions"
        for secret in secrets.values():
            owned = await trainer.http.post(chat, json={"messages": HELLO}, headers=bearer(secret))
            assert owned.status_code == 401
        base = trainer.served.url
        mine = bearer(agent.key)
        native = (f"/v1/sessions/{agent.id}", "/v1/sessions", "/v1/status", "/v1/models")
        for path in native:
            assert (await trainer.http.get(base + path, headers=mine)).status_code == 401
        created = await trainer.http.post(f"{base}/v1/sessions", json={}, headers=mine)
        assert created.status_code == 401
        foreign = bearer(secrets["other"])
        path = f"{base}/v1/sessions/{agent.id}"
        assert (await trainer.http.get(path, headers=foreign)).status_code == 404
        assert (await trainer.http.delete(path, headers=foreign)).status_code == 404
        operator = bearer(secrets["operator"])
        assert (await trainer.http.get(path, headers=operator)).status_code == 403


async def test_web_pages_cannot_use_a_session(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        [agent] = await trainer.create(**LIMITED)
        page = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}
        refused = await agent.post("/v1/chat/completions", {"messages": HELLO}, headers=page)
        rebound = await agent.post(
            "/v1/chat/completions", {"messages": HELLO}, headers={"host": "evil.example"}
        )
    assert (refused.status_code, rebound.status_code) == (403, 403)
    assert trainer.engine.submitted == []


async def test_large_body_is_refused_and_others_are_served(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        one, other = await trainer.create(**LIMITED, n=2)
        headers = {**bearer(one.key), "content-type": "application/json"}
        path = f"{one.url}/v1/chat/completions"
        huge = await trainer.http.post(path, content=b"[" * (100 * 2**20), headers=headers)
        assert huge.status_code == 413
        assert await other.text()
        assert (await trainer.status(one))["usage"]["num_turns"] == 0


async def test_flood_of_one_agent_is_refused_and_others_are_served(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with training(tmp_path, engine, sessions={"max_running_calls": 2}) as trainer:
        one, other = await trainer.create(**LONG, n=2)
        flood = [asyncio.create_task(one.chat()) for _ in range(12)]
        await until_running(engine, 2)
        calm = asyncio.create_task(other.chat())
        await until_running(engine, 3)
        engine.step(400)
        statuses = sorted([(await call).status_code for call in flood])
        assert (await calm).status_code == 200
    assert statuses == [200, 200] + [429] * 10


async def test_prompts_that_are_prepared_at_the_same_time_are_limited(tmp_path: Path) -> None:
    engine = SlowTemplate()
    async with training(tmp_path, engine, sessions={"max_running_calls": 2}) as trainer:
        [agent] = await trainer.create(**LIMITED)
        body = {"model": "any", "messages": HELLO}
        path = "/v1/messages/count_tokens"
        counts = [asyncio.create_task(agent.post(path, body)) for _ in range(4)]
        answered = asyncio.as_completed(counts)
        refused = [await asyncio.wait_for(next(answered), 20) for _ in range(2)]
        engine.go.set()
        statuses = sorted([(await count).status_code for count in counts])
        assert (await agent.post(path, body)).status_code == 200
    assert [answer.status_code for answer in refused] == [429, 429]
    assert statuses == [200, 200, 429, 429]


async def test_conversations_are_matched_one_at_a_time_with_turns_of_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that sends many conversations delays another one by one of them."""
    go, order, running = threading.Event(), list[str](), threading.Lock()

    def match_slowly(self: Conversations, chat_request: ChatRequest) -> None:
        assert running.acquire(blocking=False), "one at a time"
        assert go.wait(30)
        order.append(chat_request.messages[0]["content"])
        running.release()

    monkeypatch.setattr(Conversations, "match", match_slowly)
    async with training(tmp_path) as trainer, asyncio.timeout(60):
        flooding, calm = await trainer.create(**LIMITED, n=2)
        matching = trainer.served.server.threads.limiter
        floods = []
        for _ in range(6):
            floods.append(asyncio.create_task(flooding.chat([{**HELLO[0], "content": "flood"}])))
        while matching.num_waiting < 5:
            await asyncio.sleep(0.001)
        call = asyncio.create_task(calm.chat([{**HELLO[0], "content": "calm"}]))
        while matching.num_waiting < 6:
            await asyncio.sleep(0.001)
        go.set()
        assert {(await each).status_code for each in (*floods, call)} == {200}
    assert order.index("calm") <= 2


async def test_turns_and_tokens_are_limited(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        [few] = await trainer.create(**LIMITED, max_turns=1)
        [short] = await trainer.create(max_tokens_total=7)
        assert await few.text()
        assert len(await short.text()) == 2
        async with few.openai() as speaker:
            with pytest.raises(openai.PermissionDeniedError) as refused:
                await speaker.chat.completions.create(model="any", messages=HELLO)
        assert refused.value.code == "session_exhausted"
        async with anthropic.AsyncAnthropic(
            base_url=short.url, api_key=short.key, max_retries=0
        ) as speaker:
            with pytest.raises(anthropic.PermissionDeniedError) as budget:
                await speaker.messages.create(model="any", messages=HELLO, max_tokens=5)
        assert "7 tokens" in str(budget.value)
        assert (await trainer.status(short))["usage"]["num_context_tokens"] == 5


@pytest.mark.parametrize("limit", ["max_turns", "max_running_calls"])
async def test_answered_call_is_counted_once_while_it_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    def record_slowly(self: Conversations, *given: Any) -> None:
        time.sleep(0.3)
        record(self, *given)

    record = Conversations.record
    monkeypatch.setattr(Conversations, "record", record_slowly)
    settings = {"max_running_calls": 1} if limit == "max_running_calls" else {}
    async with training(tmp_path, sessions=settings) as trainer:
        [agent] = await trainer.create(**LIMITED, max_turns=2)
        answers = [await agent.chat() for _ in range(2)]
        assert (await agent.chat()).status_code == 403
    assert [answer.status_code for answer in answers] == [200, 200]


async def test_calls_after_the_end_are_refused(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        [agent] = await trainer.create(**LIMITED)
        await agent.text()
        await trainer.finish(agent)
        late = await agent.chat()
    assert (late.status_code, late.json()["code"]) == (410, "session_closed")


async def test_finish_is_idempotent_and_other_rewards_are_refused(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        [agent] = await trainer.create(**LIMITED)
        await agent.text()
        first = await trainer.finish(agent, reward=1.0)
        assert await trainer.finish(agent, reward=1.0) == first
        path = f"/v1/sessions/{agent.id}/finish"
        other = await trainer.served.http.post(path, json={"reward": 0.0})
        assert other.status_code == 410
        assert await trainer.cancel(agent) == first


async def test_rewards_are_refused_while_a_call_runs(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with training(tmp_path, engine) as trainer:
        [agent] = await trainer.create(**LIMITED)
        first = asyncio.create_task(agent.chat())
        await until_running(engine)
        engine.step(3)
        text = (await first).json()["choices"][0]["message"]["content"]
        [leaf] = (await trainer.tree(agent))["groups"][0]["leaves"]
        answer = {"role": "assistant", "content": text}
        call = asyncio.create_task(agent.chat([*HELLO, answer, *HELLO]))
        await until_running(engine)
        engine.step(1)
        path = f"/v1/sessions/{agent.id}/finish"
        refused = await trainer.served.http.post(path, json={"rewards": {leaf: 1.0}})
        assert refused.status_code == 422 and "running" in refused.text
        engine.step(2)
        assert (await call).status_code == 200
        [leaf] = (await trainer.tree(agent))["groups"][0]["leaves"]
        finished = await trainer.finish(agent, rewards={leaf: 1.0})
    assert list(finished["rewards"]) == finished["groups"][0]["leaves"] == [leaf]


class FaultyAbort(FakeEngine):
    """Fails to abort samples while `fails` is set."""

    def __init__(self) -> None:
        super().__init__(instant=False)
        self.fails = True

    async def abort(self, sample_ids: Sequence[str]) -> None:
        if self.fails:
            raise RuntimeError("no reply")
        await super().abort(sample_ids)


async def test_session_ends_although_its_call_cannot_be_aborted(tmp_path: Path) -> None:
    engine = FaultyAbort()
    async with training(tmp_path, engine) as trainer, asyncio.timeout(60):
        [agent] = await trainer.create(**LONG)
        call = asyncio.create_task(agent.chat())
        await until_running(engine)
        answer = await trainer.finish(agent, reward=1.0)
        assert answer["state"] == "finished"
        assert (await trainer.finish(agent, reward=1.0))["sequence"] == answer["sequence"]
        engine.fails = False
        engine.step(400)
        assert (await call).status_code == 200


async def test_two_finishes_at_once_have_one_answer(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with training(tmp_path, engine) as trainer:
        [agent] = await trainer.create(**LONG)
        call = asyncio.create_task(agent.chat())
        await until_running(engine)
        engine.step(2)
        finishes = [trainer.finish(agent, reward=1.0) for _ in range(3)]
        answers = await asyncio.gather(*finishes)
        await call
    assert answers[0] == answers[1] == answers[2]
    assert tokens(answers[0]) == [(True, [5, 6])]
    assert answers[0]["turns"][0]["finish_reason"] == "aborted"


async def test_disconnected_call_keeps_its_tokens(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with training(tmp_path, engine) as trainer:
        [agent] = await trainer.create(**LONG)
        call = asyncio.create_task(agent.chat())
        await until_running(engine)
        engine.step(4)
        call.cancel()
        await until_no_calls(trainer, agent)
        answer = await trainer.tree(agent)
    assert tokens(answer) == [(True, [5, 6, 7, 8])]
    assert answer["turns"][0]["finish_reason"] == "aborted"


async def test_cancelled_stream_keeps_its_tokens(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with training(tmp_path, engine) as trainer:
        [agent] = await trainer.create(**LONG)
        async with agent.openai() as speaker:
            stream = await speaker.chat.completions.create(model="any", messages=HELLO, stream=True)
            await until_running(engine)
            engine.step(3)
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
            await stream.close()
        await until_no_calls(trainer, agent)
        answer = await trainer.tree(agent)
    assert tokens(answer) == [(True, [5, 6, 7])]


async def test_call_that_samples_nothing_adds_nothing(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with training(tmp_path, engine) as trainer:
        [agent] = await trainer.create(**LONG)
        call = asyncio.create_task(agent.chat())
        await until_running(engine)
        call.cancel()
        await until_no_calls(trainer, agent)
        answer = await trainer.tree(agent)
    assert (answer["groups"], answer["turns"]) == ([], [])
    assert answer["usage"]["num_context_tokens"] == 0


async def test_same_prompt_twice_at_once_gives_two_samples(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with training(tmp_path, engine) as trainer:
        [agent] = await trainer.create(**LIMITED)
        calls = [asyncio.create_task(agent.chat()) for _ in range(2)]
        await until_running(engine, 2)
        engine.step(3)
        assert [(await call).status_code for call in calls] == [200, 200]
        answer = await trainer.finish(agent)
    assert tokens(answer) == [(True, [5, 6, 7])] * 2
    assert sorted(turn["reason"] for turn in answer["turns"]) == ["new_conversation", "retry"]


async def test_dead_engine_loses_no_session(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with training(tmp_path, engine) as trainer:
        [agent] = await trainer.create(**LIMITED)
        call = asyncio.create_task(agent.chat())
        await until_running(engine)
        engine.step(3)
        assert (await call).status_code == 200
        second = asyncio.create_task(agent.chat())
        await until_running(engine)
        engine.die()
        assert (await second).status_code == 503
        answer = await trainer.cancel(agent)
    assert tokens(answer) == [(True, [5, 6, 7])]


async def test_response_that_cannot_be_parsed_keeps_its_tokens_and_other_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("secret")

    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    async with training(tmp_path) as trainer:
        one, other = await trainer.create(**LIMITED, n=2)
        monkeypatch.setattr("tests.fake_openai_server.FirstToolParser.extract_tool_calls", broken)
        failed = await one.chat(tools=[tool])
        assert (failed.status_code, "secret" in failed.text) == (500, False)
        await until_no_calls(trainer, one)
        assert await other.text() and await one.text()
        answer = await trainer.finish(one)
    assert len(answer["turns"]) == 2


async def test_session_expires_after_its_last_call(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        [agent] = await trainer.create(**LIMITED, ttl_seconds=0.05)
        await agent.text()
        async with asyncio.timeout(20):
            while (await trainer.status(agent))["state"] == "open":
                await asyncio.sleep(0.01)
                trainer.served.server.sessions.check_due()
        answer = await trainer.tree(agent)
    assert (answer["state"], answer["end_reason"]) == ("expired", "expired")
    assert tokens(answer) == [(True, [5, 6, 7])]


async def test_running_call_keeps_a_session_open(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with training(tmp_path, engine) as trainer:
        [agent] = await trainer.create(**LIMITED, ttl_seconds=0.01)
        call = asyncio.create_task(agent.chat())
        await until_running(engine)
        await asyncio.sleep(0.02)
        trainer.served.server.sessions.check_due()
        engine.step(3)
        assert (await call).status_code == 200


async def test_open_sessions_are_limited(tmp_path: Path) -> None:
    limits = {"max_open": 3, "max_open_per_key": 2}
    async with training(tmp_path, sessions=limits) as trainer:
        [one, _] = await trainer.create(n=2)
        path = "/v1/sessions"
        assert (await trainer.served.http.post(path, json={})).status_code == 429
        assert (await trainer.served.http.post(path, json={"n": 4})).status_code == 503
        await trainer.cancel(one)
        assert (await trainer.served.http.post(path, json={})).status_code == 200


async def test_memory_is_limited_and_ended_sessions_are_dropped_first(tmp_path: Path) -> None:
    async with training(tmp_path, sessions={"max_bytes": 20_000}) as trainer:
        [first] = await trainer.create(**LIMITED)
        await first.text()
        await trainer.finish(first)
        [second] = await trainer.create(**LIMITED)
        await second.text()
        await until_no_calls(trainer, second)
        gone = await trainer.served.http.get(f"/v1/sessions/{first.id}")
        assert gone.status_code == 404
        assert (await first.chat()).status_code == 410
        while (answer := await second.chat()).status_code == 200:
            pass
    assert (answer.status_code, answer.json()["code"]) == (503, "overloaded")


async def test_options_take_memory_and_new_sessions_are_refused_above_it(tmp_path: Path) -> None:
    async with training(tmp_path, sessions={"max_bytes": 30_000}) as trainer:
        options = {"metadata": {f"key-{number}": "a" * 500 for number in range(30)}}
        two = await trainer.create(**options, n=2)
        assert 30_000 < trainer.served.server.sessions.num_bytes < 34_000, "shared by the group"
        path = "/v1/sessions"
        refused = await trainer.served.http.post(path, json={})
        assert (refused.status_code, refused.json()["code"]) == (503, "overloaded")
        await trainer.cancel(two[0])
        await trainer.create()


async def test_retried_creation_returns_the_same_sessions(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        headers = {"idempotency-key": "batch-7"}
        first = await trainer.create(headers, **LIMITED, n=2)
        again = await trainer.create(headers, **LIMITED, n=2)
        assert [(agent.id, agent.key) for agent in first] == [
            (agent.id, agent.key) for agent in again
        ]
        body = {**LIMITED, "n": 3}
        other = await trainer.served.http.post("/v1/sessions", json=body, headers=headers)
        assert (other.status_code, other.json()["code"]) == (422, "idempotency_mismatch")
        rollout = {"groups": [{"prompt": {"token_ids": [1]}}], "sampling": {"max_tokens": 1}}
        answer = await trainer.served.http.post("/v1/rollouts", json=rollout, headers=headers)
        assert answer.status_code == 200


async def test_sessions_of_another_replica_are_redirected(tmp_path: Path) -> None:
    shared, url = InMemoryRegistry(), "http://owner.example:8000"
    async with (
        training(tmp_path / "a", shared=shared, server={"advertised_url": url}) as one,
        training(tmp_path / "b", shared=shared) as other,
    ):
        await other.served.server.cluster.refresh()
        [agent] = await one.create(**LIMITED, group="step-7")
        group = f"{agent.id.partition('.')[0]}.step-7"
        base, path = other.served.url, f"/sessions/{agent.id}/v1/models"
        found = [
            await one.http.get(base + f"/v1/sessions/{agent.id}"),
            await one.http.get(base + path),
            await one.http.get(f"{base}/v1/sessions", params={"group": group}),
        ]
        unknown = await one.http.get(f"{base}/sessions/{'0' * 12}.x/v1/models")
    assert [answer.status_code for answer in found] == [307] * 3
    assert found[1].headers["location"] == url + path
    assert unknown.status_code == 401


async def test_stream_of_another_replica_is_redirected(tmp_path: Path) -> None:
    shared, url = InMemoryRegistry(), "http://owner.example:8000"
    async with (
        training(tmp_path / "a", shared=shared, server={"advertised_url": url}) as one,
        training(tmp_path / "b", shared=shared) as other,
    ):
        await other.served.server.cluster.refresh()
        [agent] = await one.create(**LIMITED)
        replica = agent.id.partition(".")[0]
        path = f"{other.served.url}/v1/sessions"
        found = await one.http.get(path, params={"replica": replica, "after": "7"})
        gone = await one.http.get(path, params={"replica": "0" * 12})
        both = await one.http.get(path, params={"replica": replica, "group": f"{replica}.g"})
        own = other.served.server.cluster.own_id
        async with one.http.stream("GET", path, params={"replica": own}) as answer:
            assert answer.status_code == 200
    assert found.status_code == 307
    assert found.headers["location"] == f"{url}/v1/sessions?replica={replica}&after=7"
    assert gone.json()["code"] == "replica_gone"
    assert both.status_code == 422


async def test_base_url_is_that_of_the_replica(tmp_path: Path) -> None:
    url = "http://owner.example:8000"
    async with training(tmp_path, server={"advertised_url": url}) as trainer:
        answer = await trainer.served.http.post("/v1/sessions", json={})
    [start] = answer.json()["sessions"]
    assert start["base_url"] == url + start["path"]
    assert answer.headers["cache-control"] == "no-store"

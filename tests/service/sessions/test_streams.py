"""Groups of sessions, and the stream of those that have ended."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from service.sessions import store
from service.sessions.session import Session
from tests.fake_engine import FakeEngine
from tests.service.sessions.agents import Agent, Trainer, tokens, training

LIMITED: dict[str, Any] = {"sampling": {"max_tokens": 3}}


async def records(trainer: Trainer, **params: Any) -> AsyncIterator[dict[str, Any]]:
    async with trainer.served.http.stream("GET", "/v1/sessions", params=params) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            yield json.loads(line)


async def all_records(trainer: Trainer, **params: Any) -> list[dict[str, Any]]:
    async with asyncio.timeout(20):
        return [record async for record in records(trainer, **params)]


async def group_of(trainer: Trainer, agent: Agent) -> str:
    group: str = (await trainer.status(agent))["group"]
    return group


async def test_stream_of_a_group_has_each_session_once_and_ends(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        one, two = await trainer.create(**LIMITED, n=2, group="step-7")
        group = await group_of(trainer, one)
        assert group.endswith(".step-7")
        reading = asyncio.create_task(all_records(trainer, group=group))
        await two.text()
        await trainer.finish(two, reward=1.0)
        await one.text()
        await trainer.cancel(one)
        first, second, end = await reading
    assert [first["session"]["id"], second["session"]["id"]] == [two.id, one.id]
    assert tokens(first["session"]) == [(True, [5, 6, 7])]
    assert end == {"type": "end", "num_sessions": 2, "num_finished": 1, "num_dropped": 0}


class CountedName(str):
    """A name that counts comparisons with other names."""

    comparisons = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountedName.comparisons += 1
        return str.__eq__(self, other)


async def test_end_of_a_session_costs_nothing_for_the_streams_of_other_groups(
    tmp_path: Path,
) -> None:
    async with training(tmp_path) as trainer:
        manager, owner = trainer.served.server.sessions, CountedName("local")
        for agent in await trainer.create(n=100):
            await trainer.cancel(agent)
        groups = [await group_of(trainer, *await trainer.create()) for _ in range(10)]
        streams = [manager.stream(owner, group, 0) for group in groups]
        waiting = [asyncio.ensure_future(anext(stream)) for stream in streams]
        [last] = await trainer.create()
        CountedName.comparisons = 0
        await trainer.cancel(last)
        assert CountedName.comparisons < 100
        await manager.close()
        ended = [
            item.group_id for item in await asyncio.gather(*waiting) if isinstance(item, Session)
        ]
    assert ended == groups


async def test_stream_continues_after_a_sequence(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        agents = await trainer.create(**LIMITED, n=3)
        for agent in agents:
            await trainer.finish(agent)
        group = await group_of(trainer, agents[0])
        *found, _ = await all_records(trainer, group=group)
        sequences = [record["session"]["sequence"] for record in found]
        *rest, _ = await all_records(trainer, group=group, after=sequences[0])
    assert sequences == sorted(sequences)
    assert [record["session"]["id"] for record in rest] == [agent.id for agent in agents[1:]]


async def test_stream_continues_after_a_restart(tmp_path: Path) -> None:
    last = 0
    for _ in range(2):
        async with training(tmp_path) as trainer:
            [agent] = await trainer.create(**LIMITED)
            await trainer.finish(agent)
            records_after = await all_records(
                trainer, group=await group_of(trainer, agent), after=last
            )
        assert [record["type"] for record in records_after] == ["session", "end"]
        last = records_after[0]["session"]["sequence"]
    assert last < 2**53, "a JSON number has 53 bits"


async def test_stream_without_a_group_has_all_groups(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        for _ in range(2):
            [agent] = await trainer.create(**LIMITED)
            await trainer.finish(agent)
        found = []
        async for record in records(trainer):
            found.append(record)
            if len(found) == 2:
                break
    assert len({record["session"]["group"] for record in found}) == 2


async def test_progress_is_sent_while_no_session_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "PROGRESS_SECONDS", 0.01)
    async with training(tmp_path) as trainer:
        [agent] = await trainer.create(**LIMITED)
        async for record in records(trainer, group=await group_of(trainer, agent)):
            assert record == {"type": "progress", "num_open": 1}
            break


@pytest.mark.parametrize(
    "query", [{"after": "-1"}, {"after": "x"}, {"after": "9" * 5000}, {"other": "1"}]
)
async def test_invalid_position_is_refused(tmp_path: Path, query: dict[str, str]) -> None:
    async with training(tmp_path) as trainer:
        answer = await trainer.served.http.get("/v1/sessions", params=query)
    assert answer.status_code == 422


async def test_surplus_sessions_are_cancelled_with_their_tokens(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with training(tmp_path, engine) as trainer:
        one, two, three = await trainer.create(
            n=3, sampling={"max_tokens": 100}, finish={"num_sessions": 2}
        )
        call = asyncio.create_task(three.chat())
        async with asyncio.timeout(20):
            while not engine.running:
                await asyncio.sleep(0.001)
        engine.step(2)
        await trainer.finish(one)
        assert (await trainer.status(three))["state"] == "open"
        await trainer.finish(two)
        await call
        group = await group_of(trainer, one)
        *_, last, end = await all_records(trainer, group=group)
    assert (last["session"]["id"], last["session"]["end_reason"]) == (three.id, "surplus")
    assert tokens(last["session"]) == [(True, [5, 6])]
    assert end["num_finished"] == 2


async def test_deadline_cancels_open_sessions(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        one, two = await trainer.create(**LIMITED, n=2, finish={"deadline_seconds": 0.5})
        await trainer.finish(one)
        group = await group_of(trainer, one)
        first, second, _ = await all_records(trainer, group=group)
    assert first["session"]["end_reason"] == "finished"
    assert (second["session"]["id"], second["session"]["end_reason"]) == (two.id, "deadline")


async def test_stream_of_an_unknown_group_is_refused(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        answer = await trainer.served.http.get("/v1/sessions", params={"group": "step-7"})
    assert (answer.status_code, answer.json()["code"]) == (404, "session_not_found")


async def test_group_cannot_require_more_sessions_than_it_has(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        body = {"n": 1, "finish": {"num_sessions": 2}}
        answer = await trainer.served.http.post("/v1/sessions", json=body)
    assert answer.status_code == 422


async def test_label_of_a_group_is_used_once(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        await trainer.create(group="step-7")
        answer = await trainer.served.http.post("/v1/sessions", json={"group": "step-7"})
    assert answer.status_code == 422


async def test_drain_waits_for_sessions_and_then_cancels_them(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        one, two = await trainer.create(**LIMITED, n=2)
        await two.text()
        group = await group_of(trainer, one)
        reading = asyncio.create_task(all_records(trainer, group=group))
        draining = asyncio.create_task(trainer.served.server.drain(2.0))
        await asyncio.sleep(0.05)
        assert (await two.chat()).status_code == 503
        refused = await trainer.served.http.post("/v1/sessions", json={})
        assert refused.status_code == 503
        await trainer.finish(one, reward=1.0)
        first, second, end = await reading
        await draining
    assert first["session"]["end_reason"] == "finished"
    assert second["session"]["end_reason"] == "drain"
    assert tokens(second["session"]) == [(True, [5, 6, 7])]
    assert end["num_finished"] == 1

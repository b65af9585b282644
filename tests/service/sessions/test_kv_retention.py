"""KV that the engine retains for paused sessions: which samples, and when it is released."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.types.feature_stats import KvRetentionStats
from service.sessions.kv_release import KvReleaseQueue
from tests.fake_engine import FakeEngine
from tests.service.sessions.agents import Agent, training

LIMITED: dict[str, Any] = {"sampling": {"max_tokens": 3}}


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


async def test_samples_of_a_session_name_it(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        [agent] = await trainer.create(**LIMITED)
        await agent.text()
        rollout = {"groups": [{"prompt": {"token_ids": [1]}}], "sampling": {"max_tokens": 1}}
        await trainer.served.http.post("/v1/rollouts", json=rollout)
        assert [each.session_id for each in trainer.engine.submitted] == [agent.id, None]


async def test_kv_is_retained_until_the_session_ends(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        finished, cancelled = await trainer.create(**LIMITED, n=2)
        for agent in (finished, cancelled):
            await agent.text()
        assert trainer.engine.released_sessions == []
        await trainer.finish(finished)
        await trainer.cancel(cancelled)
        assert sum(trainer.engine.released_sessions, []) == [finished.id, cancelled.id]


async def test_kv_of_expired_sessions_is_released(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        [agent] = await trainer.create(**LIMITED)
        session = trainer.session(agent)
        session.expires_at = 0
        trainer.served.server.sessions.check_due()
        await session.ended.wait()
        await until(lambda: trainer.engine.released_sessions == [[agent.id]])


@pytest.mark.parametrize("limit", [{"max_turns": 1}, {"max_tokens_total": 8}])
async def test_kv_of_exhausted_sessions_is_released(tmp_path: Path, limit: Any) -> None:
    async with training(tmp_path) as trainer:
        [agent] = await trainer.create(**LIMITED, **limit)
        await agent.chat()
        await until(lambda: trainer.engine.released_sessions == [[agent.id]])


async def test_sessions_that_end_together_are_released_together(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.release_gate = asyncio.Event()
    async with training(tmp_path, engine) as trainer:
        agents: list[Agent] = await trainer.create(**LIMITED, n=5)
        for agent in agents:
            await trainer.cancel(agent)
        await until(lambda: engine.released_sessions)
        engine.release_gate.set()
        await until(lambda: len(engine.released_sessions) == 2)
        first, *rest = (agent.id for agent in agents)
        assert engine.released_sessions == [[first], rest]


async def test_sessions_end_although_the_engine_is_dead(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        [agent] = await trainer.create(**LIMITED)
        await agent.text()
        trainer.engine.die()
        assert (await trainer.finish(agent))["state"] == "finished"


async def test_retained_kv_is_counted(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.retained = KvRetentionStats(num_blocks=7, num_sessions=2, num_released={"returned": 5})
    async with training(tmp_path, engine) as trainer:
        text = (await trainer.served.http.get("/metrics")).text
    assert "coppice_session_kv_retained_blocks 7.0" in text
    assert "coppice_session_kv_retained_sessions 2.0" in text
    assert 'coppice_session_kv_released_blocks_total{reason="returned"} 5.0' in text


async def test_sessions_of_a_failed_release_are_released_with_the_next_one() -> None:
    tasks, released = list[asyncio.Task[None]](), list[list[str]]()

    async def release(session_ids: Sequence[str]) -> None:
        released.append(list(session_ids))
        if len(released) == 1:
            raise TimeoutError

    def track(sending: Coroutine[Any, Any, None]) -> None:
        tasks.append(asyncio.create_task(sending))

    queue = KvReleaseQueue(release, track=track)
    queue.add("a")
    await asyncio.gather(*tasks, return_exceptions=True)
    queue.add("b")
    await asyncio.gather(*tasks, return_exceptions=True)
    assert released == [["a"], ["a", "b"]]

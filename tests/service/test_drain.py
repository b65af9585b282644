"""Log of a drain: the work that it still waits for."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from service.drain import RemainingWork
from tests.fake_engine import FakeEngine
from tests.service.prompt_kv.export_requests import export_handle
from tests.service.test_rollouts import body, group, running_samples
from tests.serving import Served, serving

PROMPT = [1 + i % 200 for i in range(70)]
ASYNC = {"prefer": "respond-async"}


async def with_all_work(served: Served) -> None:
    """Give a server a result to fetch, a prompt-KV handle, a session and a running rollout."""
    engine = served.server.engine
    assert isinstance(engine, FakeEngine)
    engine.instant = True
    await served.http.post("/v1/rollouts", json=body(group(1)), headers=ASYNC)
    await export_handle(served, PROMPT)
    await served.http.post("/v1/sessions", json={"n": 2})
    while served.server.rollouts.num_running:
        await asyncio.sleep(0.001)
    engine.instant = False
    await served.http.post("/v1/rollouts", json=body(group(2, n=3)), headers=ASYNC)
    await running_samples(served, 3)


async def test_drain_logs_regularly_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("service.drain.LOG_SECONDS", 0.05)
    caplog.set_level(logging.INFO, "service.drain")
    async with serving(FakeEngine(prompt_kv=True), tmp_path) as served:
        await with_all_work(served)
        await served.server.drain(0.3)
    regular = [each for each in caplog.records if "draining for" in each.message]
    (last,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert len(regular) >= 2 and "the drain ends after 0 s" in last.message
    for record in (*regular, last):
        fields: dict[str, Any] = vars(record)
        assert (fields["num_requests"], fields["num_samples"]) == (1, 3)
        assert (fields["num_handles"], fields["num_results"]) == (1, 1)
        assert (fields["num_sessions"], fields["num_downloads"]) == (2, 0)
        assert 50 < fields["lease_seconds"] <= 60
        assert 590 < fields["result_seconds"] <= 600


async def test_sessions_that_cannot_go_on_are_cancelled_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("service.drain.FINISH_SECONDS", 0.05)
    caplog.set_level(logging.INFO, "service.drain")
    async with serving(FakeEngine(), tmp_path) as served:
        await served.http.post("/v1/sessions", json={"n": 2})
        async with asyncio.timeout(20):
            await served.server.drain(3600)
        assert served.server.sessions.num_open == 0
    assert caplog.messages[-1].startswith("drained in")


async def test_drain_without_work_logs_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "service.drain")
    async with serving(FakeEngine(), tmp_path) as served:
        await served.server.drain(30)
    assert [each.message for each in caplog.records] == ["drained in 0.0 s"]


def test_only_the_remaining_kinds_of_work_are_named() -> None:
    nothing: dict[str, Any] = dict.fromkeys(RemainingWork.__dataclass_fields__, 0)
    assert str(RemainingWork(**nothing)) == "nothing"
    some = RemainingWork(**{**nothing, "num_handles": 2, "lease_seconds": 42.6, "num_sessions": 1})
    assert str(some) == "prompt-KV handles: 2 (leases end in 43 s), agent sessions: 1"

"""Stopping a whole server with real signals, over the fake engine."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.app import create_app
from service.http.serve import open_listener, run_server, server_url
from tests.fake_engine import FakeEngine
from tests.service.test_rollouts import body, group
from tests.serving import settings_for

Script = Callable[[httpx.AsyncClient, FakeEngine], Coroutine[Any, Any, None]]


def run(script: Script, tmp_path: Path, engine: FakeEngine, *, drain_seconds: int = 30) -> None:
    """The server runs in this thread, where signals arrive; `script`, its caller, in another."""
    settings = settings_for(tmp_path, server={"drain_seconds": drain_seconds})
    app = create_app(settings, engine)
    failures: list[BaseException] = []
    with open_listener("127.0.0.1", 0) as listener:
        url = server_url(listener)

        async def call() -> None:
            async with httpx.AsyncClient(base_url=url, timeout=30) as http:
                while (await http.get("/readyz")).status_code != 200:
                    await asyncio.sleep(0.01)
                await script(http, engine)

        def caller() -> None:
            try:
                asyncio.run(call())
            except BaseException as error:
                failures.append(error)
                os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=caller)
        thread.start()
        run_server(app, app.state.server, settings, listener)
        thread.join()
    if failures:
        raise failures[0]


async def running(http: httpx.AsyncClient, count: int) -> None:
    while (await http.get("/v1/status")).json()["num_samples_running"] != count:
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_finishes_running_groups_and_refuses_new_ones(
    tmp_path: Path, number: signal.Signals
) -> None:
    async def script(http: httpx.AsyncClient, engine: FakeEngine) -> None:
        early = asyncio.create_task(http.post("/v1/rollouts", json=body(group(1, n=2))))
        await running(http, 2)
        os.kill(os.getpid(), number)
        await asyncio.sleep(0.2)
        late = await http.post("/v1/rollouts", json=body(group(2)))
        assert (late.status_code, late.json()["code"]) == (503, "draining")
        assert int(late.headers["retry-after"]) > 0
        assert (await http.get("/readyz")).json()["code"] == "draining"
        assert (await http.get("/livez")).status_code == 200
        engine.step(4)
        assert (await early).json()["outcome"] == "done"

    run(script, tmp_path, FakeEngine(instant=False))
    assert list((tmp_path / "weights").iterdir()) == []


def test_sample_that_outlives_the_drain_returns_its_tokens(tmp_path: Path) -> None:
    async def script(http: httpx.AsyncClient, engine: FakeEngine) -> None:
        early = asyncio.create_task(http.post("/v1/rollouts", json=body(group(1))))
        await running(http, 1)
        engine.step(3)
        os.kill(os.getpid(), signal.SIGTERM)
        answer = (await early).json()
        assert answer["outcome"] == "cancelled"
        assert len(answer["groups"][0]["samples"][0]["token_ids"]) == 3

    run(script, tmp_path, FakeEngine(instant=False), drain_seconds=1)


@pytest.mark.parametrize("between_seconds", [0.0, 0.1])
def test_second_signal_ends_at_once_with_a_problem(tmp_path: Path, between_seconds: float) -> None:
    async def script(http: httpx.AsyncClient, engine: FakeEngine) -> None:
        early = asyncio.create_task(http.post("/v1/rollouts", json=body(group(1))))
        await running(http, 1)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(between_seconds)
        os.kill(os.getpid(), signal.SIGINT)
        async with asyncio.timeout(30):
            answer = await early
        assert answer.json()["code"] == "engine_dead"

    run(script, tmp_path, FakeEngine(instant=False), drain_seconds=600)


def test_signal_handlers_are_restored(tmp_path: Path) -> None:
    async def script(http: httpx.AsyncClient, engine: FakeEngine) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run(script, tmp_path, FakeEngine())
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before

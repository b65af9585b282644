"""Behaviour that only an event loop can show."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from coppice import AsyncRollouts, Record, Retry, Rollouts
from coppice.transport.httpx_drivers import AsyncDriver
from coppice.weights.checkpoint_files import sha256_of
from tests.client.answers import LINES
from tests.client.app import App, Body, streaming


def client_of(app: App) -> AsyncRollouts:
    transport = httpx.MockTransport(app)
    return AsyncRollouts("http://coppice.test", retry=Retry.none(), transport=transport)


async def test_leaving_the_loop_closes_the_connection() -> None:
    body = Body(LINES)
    async with client_of(App(streaming(body))) as client:
        async for _ in client.stream(["hello"]):
            break
        gc.collect()
        for _ in range(5):
            await asyncio.sleep(0)
        assert body.closed


async def test_cancelled_rollout_closes_the_connection() -> None:
    begun = asyncio.Event()

    class Silent(Body):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield LINES[0]
            begun.set()
            await asyncio.Event().wait()

    body = Silent([])
    async with client_of(App(streaming(body))) as client:
        rollout = asyncio.create_task(client.rollout(["hello"]))
        await begun.wait()
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout
        assert body.closed


async def test_calls_overlap() -> None:
    arrived = asyncio.Barrier(8)

    async def answer(request: httpx.Request) -> httpx.Response:
        await arrived.wait()
        return httpx.Response(200, content=b"".join(LINES))

    transport = httpx.MockTransport(answer)
    async with AsyncRollouts("http://coppice.test", transport=transport) as client:
        async with asyncio.timeout(10):
            results = await asyncio.gather(*(client.rollout(["hello"]) for _ in range(8)))
    assert [result.id for result in results] == ["r1"] * 8


async def test_event_loop_runs_while_weights_are_written(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(bytes(64 * 2**20))
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        turning = tasks.create_task(turn())
        await AsyncDriver(httpx.AsyncClient()).run_steps(sha256_of(tmp_path / "w"))
        turning.cancel()
    assert turns > 16


class Stalling(httpx.AsyncBaseTransport):
    """Reads one chunk of a request and never answers."""

    def __init__(self) -> None:
        self.has_chunk = asyncio.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        assert isinstance(request.stream, httpx.AsyncByteStream)
        async for _ in request.stream:
            self.has_chunk.set()
            await asyncio.sleep(3600)
        raise AssertionError("not reached")


async def test_cancelled_upload_leaves_no_thread() -> None:
    transport = Stalling()
    async with AsyncRollouts("http://coppice.test", transport=transport) as client:
        state = {str(number): np.ones(2**20) for number in range(16)}
        upload = asyncio.create_task(client.upload_weights("v7", state))
        await transport.has_chunk.wait()
        upload.cancel()
        with pytest.raises(asyncio.CancelledError):
            await upload
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sha256")]


async def test_records_are_typed() -> None:
    async with client_of(App(streaming(Body(LINES)))) as client:
        records: list[Record] = [record async for record in client.stream(["hello"])]
    assert [record.type for record in records][-1] == "end"


async def test_blocking_client_works_inside_a_running_loop() -> None:
    body = Body(LINES)
    with Rollouts("http://coppice.test", transport=httpx.MockTransport(App(streaming(body)))) as it:
        for _ in it.stream(["hello"]):
            break
        assert body.closed
        assert it.rollout(["hello"]).outcome == "done"

"""Bytes on real sockets: past the event loop and through it, whole, slow, broken off."""

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from service.bounded_protocol import HANDOFF
from service.kv.sending import Sending
from tests.fake_engine import FakeEngine
from tests.service.kv.asked import handle
from tests.serving import Served, serving

pytestmark = pytest.mark.slow


def exporting() -> FakeEngine:
    return FakeEngine(prompt_kv=True, max_context_tokens=20_000)


async def large(served: Served) -> str:
    """Sixteen megabytes: more than sockets buffer without a reader."""
    known = await handle(served, [*range(256)] * 64)
    assert known.num_bytes > NUM_BYTES
    return known.handle


NUM_BYTES = 16 * 10**6
CAPACITY = {"capacity_bytes": 20 * 2**20}


class Plain:
    """The app behind another HTTP server, which hands nothing off."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        plain = {**scope, "extensions": {}} if scope["type"] == "http" else scope
        assert HANDOFF not in plain.get("extensions", {})
        await self._app(plain, receive, send)


async def test_the_thread_sends_what_the_event_loop_would(tmp_path: Path) -> None:
    async with serving(exporting(), tmp_path, kv=CAPACITY) as served:
        known = await large(served)
        transport = httpx.ASGITransport(Plain(served.app))
        async with httpx.AsyncClient(transport=transport, base_url="http://plain") as plain:
            for headers in ({}, {"Range": "bytes=100-15000000"}):
                path = f"/v1/kv/{known}/data"
                fast = await served.http.get(path, headers=headers)
                slow = await plain.get(path, headers=headers)
                assert fast.status_code == slow.status_code
                assert fast.content == slow.content
                assert fast.headers["content-length"] == str(len(fast.content))
        sent = (await served.http.get("/metrics")).text
        assert "coppice_kv_sent_bytes_total 0.0" not in sent


async def test_a_connection_is_of_use_after_a_transfer(tmp_path: Path) -> None:
    async with serving(exporting(), tmp_path, kv=CAPACITY) as served:
        known = await large(served)
        for _ in range(3):
            first = await served.http.get(f"/v1/kv/{known}/data")
            assert (await served.http.get("/readyz")).status_code == 200
        assert len(first.content) > NUM_BYTES
        assert len(served.connections) == 1


async def test_a_reader_that_leaves_leaves_no_pin_behind(tmp_path: Path) -> None:
    async with serving(exporting(), tmp_path, kv=CAPACITY) as served:
        known = await large(served)
        async with served.http.stream("GET", f"/v1/kv/{known}/data") as answer:
            async for _ in answer.aiter_bytes(1000):
                break
        await until(lambda: not served.server.sending.num_transfers)
        await served.http.delete(f"/v1/kv/{known}")
        status = served.server.prompt_kv.status()
        assert status.free_bytes == status.capacity_bytes


async def test_a_reader_that_does_not_read_is_dropped(tmp_path: Path) -> None:
    limits = {"write_seconds": 0.3}
    async with serving(exporting(), tmp_path, kv=CAPACITY, limits=limits) as served:
        known = await large(served)
        with silent_reader(served, known):
            await until(lambda: served.server.sending.num_transfers > 0)
            await until(lambda: not served.server.sending.num_transfers)


async def test_what_is_being_read_is_not_freed_by_its_release(tmp_path: Path) -> None:
    async with serving(exporting(), tmp_path, kv=CAPACITY) as served:
        known = await large(served)
        whole = (await served.http.get(f"/v1/kv/{known}/data")).content
        with silent_reader(served, known) as reader:
            await until(lambda: served.server.sending.num_transfers > 0)
            await served.http.delete(f"/v1/kv/{known}")
            status = served.server.prompt_kv.status()
            assert status.quarantined_bytes > NUM_BYTES
            served.server.prompt_kv.check()
            received = await asyncio.to_thread(read_to_end, reader, len(whole))
        assert received == whole
        await until(lambda: not served.server.prompt_kv.status().quarantined_bytes)


async def test_more_transfers_than_threads_wait_their_turn(tmp_path: Path) -> None:
    kv = {**CAPACITY, "max_transfers": 1, "max_bytes_per_second": 80e6}
    async with serving(exporting(), tmp_path, kv=kv) as served:
        known = await large(served)
        began = asyncio.get_running_loop().time()
        reads = [served.http.get(f"/v1/kv/{known}/data") for _ in range(4)]
        answers = await asyncio.gather(*reads)
        took = asyncio.get_running_loop().time() - began
        assert {answer.status_code for answer in answers} == {200}
        assert took >= 0.9 * sum(len(answer.content) for answer in answers) / 80e6


async def test_a_stop_breaks_off_what_is_being_sent(tmp_path: Path) -> None:
    async with serving(exporting(), tmp_path, kv=CAPACITY) as served:
        known = await large(served)
        with silent_reader(served, known):
            await until(lambda: served.server.sending.num_transfers > 0)
            served.server.sending.break_off()
            await until(lambda: not served.server.sending.num_transfers)


async def test_a_cancelled_transfer_has_ended_when_it_returns() -> None:
    sending = Sending(
        max_transfers=1, max_bytes_per_second=None, stall_seconds=60, sent=lambda _: None
    )
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs:
        work = asyncio.create_task(sending.send(ours, memoryview(bytes(2**24))))
        await asyncio.sleep(0.05)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
    assert (sending.num_transfers, ours.fileno()) == (0, -1)
    sending.close()


def test_it_works_on_the_loop_that_serves(tmp_path: Path) -> None:
    async def read() -> None:
        async with serving(exporting(), tmp_path, kv=CAPACITY) as served:
            known = await large(served)
            answers = await asyncio.gather(
                *(served.http.get(f"/v1/kv/{known}/data") for _ in range(6))
            )
            assert len({answer.content for answer in answers}) == 1
            assert len(answers[0].content) > NUM_BYTES

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(read())


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.01)


class silent_reader:
    """Asks, and reads the head only."""

    def __init__(self, served: Served, handle_id: str) -> None:
        host, port = served.url.removeprefix("http://").split(":")
        self._address = (host, int(port))
        self._request = f"GET /v1/kv/{handle_id}/data HTTP/1.1\r\nHost: x\r\n\r\n".encode()

    def __enter__(self) -> socket.socket:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.connect(self._address)
        self._socket.sendall(self._request)
        return self._socket

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def read_to_end(reader: socket.socket, num_bytes: int) -> bytes:
    received = bytearray()
    while b"\r\n\r\n" not in received:
        received += reader.recv(4096)
    body = received.partition(b"\r\n\r\n")[2]
    while len(body) < num_bytes:
        body += reader.recv(2**16)
    return bytes(body)

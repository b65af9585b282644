"""Transfers over real sockets, in a thread and in the event loop: complete, released, aborted."""

import asyncio
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from service.http.uvicorn_protocol import SEND_BODY_EXTENSION
from service.prompt_kv.settings import KvSettings
from service.prompt_kv.socket_sender import SocketSender
from tests.service.prompt_kv.stalled_readers import (
    CAPACITY,
    NUM_BYTES,
    exporting,
    large_handle,
    read_to_end,
    stalled_reader,
    wait_until,
)
from tests.service.prompt_kv.test_slots import Clock, sealed
from tests.serving import serving

pytestmark = pytest.mark.slow


class Plain:
    """The app behind another HTTP server, which has no socket handoff."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        plain = {**scope, "extensions": {}} if scope["type"] == "http" else scope
        assert SEND_BODY_EXTENSION not in plain.get("extensions", {})
        await self._app(plain, receive, send)


async def test_thread_sends_the_same_bytes_as_the_event_loop(tmp_path: Path) -> None:
    async with serving(exporting(), tmp_path, kv=CAPACITY) as served:
        known = await large_handle(served)
        transport = httpx.ASGITransport(Plain(served.app))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as plain:
            for headers in ({}, {"Range": "bytes=100-15000000"}):
                path = f"/v1/kv/{known}/data"
                fast = await served.http.get(path, headers=headers)
                slow = await plain.get(path, headers=headers)
                assert fast.status_code == slow.status_code
                assert fast.content == slow.content
                assert fast.headers["content-length"] == str(len(fast.content))
        on_sent = (await served.http.get("/metrics")).text
        assert "coppice_kv_sent_bytes_total 0.0" not in on_sent


async def test_connection_is_reusable_after_a_transfer(tmp_path: Path) -> None:
    async with serving(exporting(), tmp_path, kv=CAPACITY) as served:
        known = await large_handle(served)
        for _ in range(3):
            first = await served.http.get(f"/v1/kv/{known}/data")
            assert (await served.http.get("/readyz")).status_code == 200
        assert len(first.content) > NUM_BYTES
        assert len(served.connections) == 1


class BlockedSends:
    """Callback of a sender that keeps the sending threads in their first send, until `go`."""

    def __init__(self) -> None:
        self.threads = set[int]()
        self.go = threading.Event()

    def __call__(self, num_bytes: int) -> None:
        self.threads.add(threading.get_ident())
        if threading.get_ident() != threading.main_thread().ident:
            assert self.go.wait(60)


async def test_requests_are_answered_while_all_threads_are_in_a_send(tmp_path: Path) -> None:
    sends = BlockedSends()
    async with serving(exporting(), tmp_path, kv=CAPACITY) as served:
        known = await large_handle(served)
        served.server.socket_sender.close()
        settings = KvSettings(max_transfers=4)
        served.server.socket_sender = SocketSender(settings, on_sent=sends, on_ended=lambda _: None)
        reads = [asyncio.create_task(served.http.get(f"/v1/kv/{known}/data")) for _ in range(4)]
        await wait_until(lambda: len(sends.threads) == 4 or any(read.done() for read in reads))
        assert len(sends.threads) == 4 and threading.get_ident() not in sends.threads
        body = {"groups": [{"prompt": {"token_ids": [1, 2, 3]}}], "sampling": {"max_tokens": 4}}
        assert (await served.http.get("/readyz")).status_code == 200
        assert (await served.http.post("/v1/rollouts", json=body)).status_code == 200
        assert not any(read.done() for read in reads)
        sends.go.set()
        assert {answer.status_code for answer in await asyncio.gather(*reads)} == {200}
    assert threading.get_ident() not in sends.threads


async def test_disconnected_reader_leaves_no_pin(tmp_path: Path) -> None:
    async with serving(exporting(), tmp_path, kv=CAPACITY) as served:
        known = await large_handle(served)
        async with served.http.stream("GET", f"/v1/kv/{known}/data") as answer:
            async for _ in answer.aiter_bytes(1000):
                break
        await wait_until(lambda: not served.server.socket_sender.num_transfers)
        await served.http.delete(f"/v1/kv/{known}")
        status = served.server.prompt_kv.status()
        assert status.free_bytes == status.capacity_bytes


async def test_bytes_being_read_survive_their_release(tmp_path: Path) -> None:
    async with serving(exporting(), tmp_path, kv=CAPACITY) as served:
        known = await large_handle(served)
        whole = (await served.http.get(f"/v1/kv/{known}/data")).content
        with stalled_reader(served, known) as reader:
            await wait_until(lambda: served.server.socket_sender.num_transfers > 0)
            await served.http.delete(f"/v1/kv/{known}")
            status = served.server.prompt_kv.status()
            assert status.quarantined_bytes > NUM_BYTES
            served.server.prompt_kv.check()
            received = await asyncio.to_thread(read_to_end, reader, len(whole))
        assert received == whole
        await wait_until(lambda: not served.server.prompt_kv.status().quarantined_bytes)


async def test_transfers_beyond_the_thread_count_queue(tmp_path: Path) -> None:
    kv = {**CAPACITY, "max_transfers": 1, "max_bytes_per_second": 80e6}
    async with serving(exporting(), tmp_path, kv=kv) as served:
        known = await large_handle(served)
        began = asyncio.get_running_loop().time()
        reads = [served.http.get(f"/v1/kv/{known}/data") for _ in range(4)]
        answers = await asyncio.gather(*reads)
        took = asyncio.get_running_loop().time() - began
        assert {answer.status_code for answer in answers} == {200}
        assert took >= 0.9 * sum(len(answer.content) for answer in answers) / 80e6


async def test_stop_aborts_running_transfers(tmp_path: Path) -> None:
    async with serving(exporting(), tmp_path, kv=CAPACITY) as served:
        known = await large_handle(served)
        with stalled_reader(served, known):
            await wait_until(lambda: served.server.socket_sender.num_transfers > 0)
            served.server.socket_sender.abort_all()
            await wait_until(lambda: not served.server.socket_sender.num_transfers)


async def test_cancelled_transfer_has_ended_when_it_returns() -> None:
    socket_sender = SocketSender(KvSettings(), on_sent=lambda _: None, on_ended=lambda _: None)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    slots, handles, held = sealed(Clock())
    held.start_lease()
    with theirs, handles.pinned(held) as pin:
        data = memoryview(bytes(2**24))
        work = asyncio.create_task(socket_sender.send(ours, data, owner="me", pin=pin))
        await asyncio.sleep(0.05)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
    assert (socket_sender.num_transfers, ours.fileno()) == (0, -1)
    socket_sender.close()


def test_transfer_works_on_the_loop_of_the_server(tmp_path: Path) -> None:
    async def read() -> None:
        async with serving(exporting(), tmp_path, kv=CAPACITY) as served:
            known = await large_handle(served)
            answers = await asyncio.gather(
                *(served.http.get(f"/v1/kv/{known}/data") for _ in range(6))
            )
            assert len({answer.content for answer in answers}) == 1
            assert len(answers[0].content) > NUM_BYTES
            with stalled_reader(served, known) as reader:
                await wait_until(lambda: served.server.socket_sender.num_transfers > 0)
                await asyncio.sleep(0.1)  # its socket buffer is full, and the loop waits for room
                received = await asyncio.to_thread(read_to_end, reader, len(answers[0].content))
            assert received == answers[0].content

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(read())

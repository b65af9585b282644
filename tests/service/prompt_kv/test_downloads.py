"""Downloads over real sockets: complete, released, and with readers that disconnect."""

import asyncio
from pathlib import Path

import pytest
import uvloop

from tests.service.prompt_kv.stalled_readers import (
    CAPACITY,
    NUM_BYTES,
    exporting,
    large_handle,
    read_to_end,
    stalled_reader,
    wait_until,
)
from tests.serving import serving

pytestmark = pytest.mark.slow


async def test_sent_bytes_are_counted(tmp_path: Path) -> None:
    async with serving(exporting(), tmp_path, kv=CAPACITY) as served:
        known = await large_handle(served)
        received = 0
        for headers in ({}, {"Range": "bytes=100-15000000"}):
            answer = await served.http.get(f"/v1/kv/{known}/data", headers=headers)
            assert answer.headers["content-length"] == str(len(answer.content))
            received += len(answer.content)
        text = (await served.http.get("/metrics")).text
    assert float(text.partition("\ncoppice_kv_sent_bytes_total ")[2].split()[0]) == received


async def test_connection_is_reusable_after_a_transfer(tmp_path: Path) -> None:
    async with serving(exporting(), tmp_path, kv=CAPACITY) as served:
        known = await large_handle(served)
        for _ in range(3):
            first = await served.http.get(f"/v1/kv/{known}/data")
            assert (await served.http.get("/readyz")).status_code == 200
        assert len(first.content) > NUM_BYTES
        assert len(served.connections) == 1


async def test_disconnected_reader_leaves_no_pin(tmp_path: Path) -> None:
    async with serving(exporting(), tmp_path, kv=CAPACITY) as served:
        known = await large_handle(served)
        async with served.http.stream("GET", f"/v1/kv/{known}/data") as answer:
            async for _ in answer.aiter_bytes(1000):
                break
        await wait_until(lambda: not served.server.kv_downloads.num_open)
        await served.http.delete(f"/v1/kv/{known}")
        status = served.server.prompt_kv.status()
        assert status.free_bytes == status.capacity_bytes


async def test_bytes_being_read_survive_their_release(tmp_path: Path) -> None:
    async with serving(exporting(), tmp_path, kv=CAPACITY) as served:
        known = await large_handle(served)
        whole = (await served.http.get(f"/v1/kv/{known}/data")).content
        with stalled_reader(served, known) as reader:
            await wait_until(lambda: served.server.kv_downloads.num_open > 0)
            await served.http.delete(f"/v1/kv/{known}")
            status = served.server.prompt_kv.status()
            assert status.quarantined_bytes > NUM_BYTES
            served.server.prompt_kv.check()
            received = await asyncio.to_thread(read_to_end, reader, len(whole))
        assert received == whole
        await wait_until(lambda: not served.server.prompt_kv.status().quarantined_bytes)


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
                await wait_until(lambda: served.server.kv_downloads.num_open > 0)
                await asyncio.sleep(0.1)  # its socket buffer is full, and the loop waits for room
                received = await asyncio.to_thread(read_to_end, reader, len(answers[0].content))
            assert received == answers[0].content

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(read())

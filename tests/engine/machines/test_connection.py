"""The connection of a machine to machine 0, whose end is the end of the engine."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.launch.ranks.node_processes import wait_for_end_of_connection
from tests.engine.machines.second_machine import SecondMachine, namespace_or_skip
from tests.ports import free_port

WAIT_SECONDS = 30.0
SERVER = """
import socket, sys
listener = socket.create_server(("0.0.0.0", int(sys.argv[1])))
print("listening", flush=True)
connection, _ = listener.accept()
connection.recv(1)
"""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[SecondMachine]:
    with namespace_or_skip(tmp_path) as second:
        yield second


async def test_closed_connection_ends_the_wait() -> None:
    accepted: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
    server = await asyncio.start_server(
        lambda _, writer: accepted.put_nowait(writer), "127.0.0.1", 0
    )
    async with server:
        port = server.sockets[0].getsockname()[1]
        waiting = asyncio.create_task(
            wait_for_end_of_connection("127.0.0.1", port, silent_seconds=WAIT_SECONDS)
        )
        connection = await accepted.get()
        done, _ = await asyncio.wait({waiting}, timeout=0.1)
        assert not done
        connection.close()
        async with asyncio.timeout(WAIT_SECONDS):
            assert await waiting == "closed"


async def test_machine_that_no_longer_answers_ends_the_wait(
    machine: SecondMachine, tmp_path: Path
) -> None:
    port, log = free_port(), tmp_path.parent / f"{tmp_path.name}.log"
    process = machine.popen([sys.executable, "-c", SERVER, str(port)], log)
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            while not log.read_text():
                await asyncio.sleep(0.05)
            waiting = asyncio.create_task(
                wait_for_end_of_connection(machine.address, port, silent_seconds=2.0)
            )
            await asyncio.sleep(0.5)
            assert not waiting.done()
            machine.disconnect()
            assert await waiting != "closed"
    finally:
        process.kill()
        process.wait()

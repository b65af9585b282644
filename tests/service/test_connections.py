"""The limit on connections, and the limit on open files."""

import asyncio
import json
import resource
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from service.http.open_file_limit import connection_limit
from tests.fake_engine import FakeEngine
from tests.service.sockets import Raw, raw
from tests.service.test_framing import GET, sized
from tests.service.test_http_limits import SOON
from tests.service.test_rollouts import running_samples
from tests.serving import Served, serving

pytestmark = pytest.mark.slow

FEW: dict[str, Any] = {"max_connections": 4}


async def opened(stack: AsyncExitStack, served: Served, count: int) -> list[Raw]:
    return [await stack.enter_async_context(raw(served)) for _ in range(count)]


async def busy(stack: AsyncExitStack, served: Served, count: int) -> None:
    """Opens connections with one running request each."""
    for client in await opened(stack, served, count):
        await client.send(sized())
    await running_samples(served, count)


async def until_open(served: Served, count: int) -> None:
    async with asyncio.timeout(5):
        while len(served.connections) != count:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("sent", [b"", GET, b"G", GET + b"GET /li"])
async def test_idle_connections_do_not_block_new_ones(tmp_path: Path, sent: bytes) -> None:
    async with (
        serving(FakeEngine(), tmp_path, limits=FEW, wait=False) as served,
        AsyncExitStack() as stack,
    ):
        for client in await opened(stack, served, 12):
            if sent:
                await client.send(sent)
        async with asyncio.timeout(5):
            while (await served.http.get("/v1/status")).status_code != 200:
                pass
        assert len(served.connections) <= 4


async def test_past_the_limit_probes_are_answered_and_others_refused(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path, limits=FEW) as served, AsyncExitStack() as stack:
        await served.http.aclose()
        await busy(stack, served, 4)
        for path, expected in ((b"/livez", 200), (b"/readyz", 200), (b"/v1/status", 503)):
            async with raw(served) as client:
                await client.send(GET.replace(b"/livez", path))
                rest = await client.rest()
                assert rest.startswith(b"HTTP/1.1 %d" % expected)
                assert b"\r\nconnection: close\r\n" in rest
                if expected == 503:
                    assert b"\r\nretry-after: 5\r\n" in rest
                    assert json.loads(rest.split(b"\r\n\r\n")[1])["code"] == "overloaded"
        await until_open(served, 4)
        engine.step(4)
        await running_samples(served, 0)


@pytest.mark.parametrize("sent", [b"", b"GET /livez HTTP/1.1\r\n"])
async def test_idle_connections_past_the_limit_are_closed(tmp_path: Path, sent: bytes) -> None:
    """Only the last one is open, whatever it sends, and only for `limits.read_seconds`."""
    engine = FakeEngine(instant=False)
    async with (
        serving(engine, tmp_path, limits=FEW | SOON) as served,
        AsyncExitStack() as stack,
    ):
        await served.http.aclose()
        await busy(stack, served, 4)
        for _ in range(2000):
            (client,) = await opened(stack, served, 1)
            await client.send(sent)
            assert len(served.connections) <= 5
        await until_open(served, 4)
        engine.step(4)
        await running_samples(served, 0)


def test_file_descriptor_limit_bounds_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        assert connection_limit(16384) == 384
        assert connection_limit(100) == 100
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("soft", "hard"), [(256, 4096), (512, 512)])
def test_soft_limit_is_raised_to_the_hard_limit(soft: int, hard: int) -> None:
    program = f"""
import resource
from service.http.open_file_limit import raise_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
raise_file_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert found.stdout.split() == [str(hard).encode()] * 2

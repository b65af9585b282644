"""Uploads of weights that fail in the middle: nothing of them stays, and others still succeed."""

import asyncio
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from coppice import AsyncRollouts, VersionConflict
from engine.weights.magnitudes import UNKNOWN, Magnitudes
from service.checkpoint_store import WRITE_BYTES
from service.weights.stager import IncomingFile
from tests.fake_engine import FakeEngine
from tests.serving import Served, serving

CONTENT = bytes(6 * WRITE_BYTES)


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Writes beyond this size fail, as on a full disk. Python ignores the signal."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def leftovers(served: Served) -> list[Path]:
    return list(served.server.checkpoints.folder("x").parent.glob(".incoming-*"))


async def versions(served: Served) -> list[str]:
    listed = (await served.http.get("/v1/weights")).json()["versions"]
    return [version["version"] for version in listed]


async def test_upload_to_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        with file_size_limit(2 * WRITE_BYTES):
            refused = await served.http.put("/v1/weights/v1", content=CONTENT)
        assert (refused.status_code, refused.json()["code"]) == (507, "insufficient_storage")
        assert not leftovers(served)
        assert await versions(served) == ["v0"]
        assert (await served.http.put("/v1/weights/v1", content=CONTENT)).status_code == 201


async def test_client_that_ends_during_an_upload_leaves_nothing(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        address = urlsplit(served.url)
        _, writer = await asyncio.open_connection(address.hostname, address.port)
        head = f"PUT /v1/weights/v1 HTTP/1.1\r\nHost: x\r\nContent-Length: {len(CONTENT)}\r\n\r\n"
        writer.write(head.replace("Host: x", f"Host: {address.netloc}").encode() + CONTENT[: 2**21])
        await writer.drain()
        async with asyncio.timeout(20):
            while not leftovers(served):
                await asyncio.sleep(0.01)
            writer.transport.abort()
            while leftovers(served):
                await asyncio.sleep(0.01)
        assert await versions(served) == ["v0"]
        assert (await served.http.put("/v1/weights/v1", content=CONTENT)).status_code == 201


async def test_one_of_two_publishers_of_a_label_succeeds(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        async with AsyncRollouts(served.url) as one, AsyncRollouts(served.url) as other:
            results = await asyncio.gather(
                one.upload_weights("v1", {"w": np.zeros(2**18)}),
                other.upload_weights("v1", {"w": np.ones(2**18)}),
                return_exceptions=True,
            )
        refused = [result for result in results if isinstance(result, VersionConflict)]
        assert len(refused) == 1
        assert await versions(served) == ["v0", "v1"]
        assert not leftovers(served)


async def test_failed_check_leaves_nothing(tmp_path: Path) -> None:
    class FailingCheck(FakeEngine):
        def check_weights(self, path: Path, magnitudes: Magnitudes = UNKNOWN) -> None:
            raise OSError("the disk fails")

    async def chunks() -> AsyncIterator[bytes]:
        yield b"w"

    async with serving(FailingCheck(), tmp_path) as served:
        stager = served.server.stager
        with pytest.raises(OSError, match="disk"):
            await stager.upload(IncomingFile(label="v1", sequence=None, digest=None), chunks())
        assert not served.server.checkpoints.folder("v1").exists()
        assert not leftovers(served)
        assert await versions(served) == ["v0"]

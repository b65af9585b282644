"""Every upload of weights or an adapter, with each fault: nothing stays, and a repetition succeeds.

`docs/operate/reliability.md` lists the tests of all ways of publishing weights.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import numpy as np
import pytest
from safetensors.numpy import save

from service.checkpoint_store import WRITE_BYTES
from tests.adapters import adapter_config, saved_adapter, tensors_file
from tests.fake_engine import FakeEngine
from tests.service.test_weight_deltas import delta, files
from tests.service.test_weight_faults import file_size_limit
from tests.service.test_weights import activate, digest_of
from tests.serving import Served, serving

pytestmark = pytest.mark.slow

UPLOADS = ("whole", "shard", "delta", "adapter")
SERVED_LABELS = ["v0", "v1"]


def weights(seed: int) -> bytes:
    """Weights of four times `WRITE_BYTES`."""
    values = np.random.default_rng(seed).standard_normal(WRITE_BYTES, dtype=np.float32)
    content: bytes = save({"a": values})
    return content


@dataclass(frozen=True)
class Upload:
    """Upload over HTTP, and other content for the same label."""

    path: str
    content: bytes
    other: bytes
    query: Mapping[str, str] = field(default_factory=dict)

    @property
    def target(self) -> str:
        return f"{self.path}?{urlencode(self.query)}" if self.query else self.path

    async def send(self, served: Served, headers: Mapping[str, str] | None = None) -> Any:
        return await served.http.put(self.target, content=self.content, headers=headers)

    async def send_other(self, served: Served) -> Any:
        return await served.http.put(self.target, content=self.other)


def upload_of(kind: str, folder: Path) -> Upload:
    one, other = weights(1), weights(2)
    if kind == "adapter":
        config = json.dumps(adapter_config())
        one, other = (tensors_file(40_000, scale, adapter_config=config) for scale in (1.0, 2.0))
        return Upload("/v1/adapters/policy/1", one, other)
    if kind == "shard":
        return Upload("/v1/weights/v2/files/one.safetensors", one, other)
    if kind == "whole":
        return Upload("/v1/weights/v2", one, other)
    one, other = (delta(folder, weights(0), each) for each in (one, other))
    return Upload("/v1/weights/v2", one, other, {"base": "v1"})


@asynccontextmanager
async def publishing(
    folder: Path, engine: FakeEngine | None = None
) -> AsyncIterator[tuple[Served, set[str]]]:
    """A server that serves v1, and its files."""
    engine = engine or FakeEngine(max_adapters=2)
    sources = {"source_directories": [folder / "sources"]}
    async with serving(engine, folder, weights=sources) as served:
        assert (await served.http.put("/v1/weights/v1", content=weights(0))).status_code == 201
        assert (await activate(served, "v1")).status_code == 200
        yield served, files(served)
        active = (await served.http.get("/v1/status")).json()["weights_version"]
        assert active == "v1", "no fault changes the active version"


async def assert_nothing_is_left(served: Served, before: set[str]) -> None:
    assert files(served) == before
    listed = (await served.http.get("/v1/weights")).json()["versions"]
    assert [version["version"] for version in listed] == SERVED_LABELS
    assert (await served.http.get("/v1/adapters")).json()["adapters"] == []


def refusal(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


@pytest.mark.parametrize("kind", UPLOADS)
async def test_upload_to_a_full_disk_leaves_nothing(tmp_path: Path, kind: str) -> None:
    upload = upload_of(kind, tmp_path)
    async with publishing(tmp_path) as (served, before):
        with file_size_limit(2 * WRITE_BYTES):
            assert refusal(await upload.send(served)) == (507, "insufficient_storage")
        await assert_nothing_is_left(served, before)
        assert (await upload.send(served)).status_code == 201


async def test_delta_whose_result_does_not_fit_on_the_disk_leaves_nothing(tmp_path: Path) -> None:
    changed = weights(0)[:-4] + np.float32(1).tobytes()
    content = delta(tmp_path, weights(0), changed)
    upload = Upload("/v1/weights/v2", content, b"", {"base": "v1"})
    async with publishing(tmp_path) as (served, before):
        assert len(content) < WRITE_BYTES
        with file_size_limit(2 * WRITE_BYTES):
            assert refusal(await upload.send(served)) == (507, "insufficient_storage")
        await assert_nothing_is_left(served, before)
        assert (await upload.send(served)).status_code == 201


async def test_adapter_copied_to_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    path = str(saved_adapter(tmp_path / "sources" / "a", rank=40_000))
    async with publishing(tmp_path) as (served, before):
        with file_size_limit(2 * WRITE_BYTES):
            refused = await served.http.post("/v1/adapters/policy", json={"path": path})
        assert refusal(refused) == (507, "insufficient_storage")
        await assert_nothing_is_left(served, before)
        loaded = await served.http.post("/v1/adapters/policy", json={"path": path})
        assert loaded.status_code == 201


async def test_adapter_load_completes_without_its_caller(tmp_path: Path) -> None:
    class SlowLoad(FakeEngine):
        async def load_adapter(self, label: str, path: Path) -> None:
            loading.set()
            await can_load.wait()
            await super().load_adapter(label, path)

    loading, can_load = asyncio.Event(), asyncio.Event()
    path = str(saved_adapter(tmp_path / "sources" / "a"))
    async with publishing(tmp_path, SlowLoad(max_adapters=2)) as (served, _):
        load = served.http.post("/v1/adapters/policy", json={"path": path})
        caller = asyncio.create_task(load)
        await loading.wait()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        can_load.set()
        async with asyncio.timeout(20):
            while not (await served.http.get("/v1/adapters")).json()["adapters"]:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", UPLOADS)
async def test_publisher_that_ends_during_an_upload_leaves_nothing(
    tmp_path: Path, kind: str
) -> None:
    upload = upload_of(kind, tmp_path)
    async with publishing(tmp_path) as (served, before):
        address = urlsplit(served.url)
        _, writer = await asyncio.open_connection(address.hostname, address.port)
        head = f"PUT {upload.target} HTTP/1.1\r\nHost: {address.netloc}\r\n"
        head += f"Content-Length: {len(upload.content)}\r\n\r\n"
        writer.write(head.encode() + upload.content[: 2 * WRITE_BYTES])
        await writer.drain()
        async with asyncio.timeout(20):
            while files(served) == before:
                await asyncio.sleep(0.01)
            writer.transport.abort()
            while files(served) != before:
                await asyncio.sleep(0.01)
        await assert_nothing_is_left(served, before)
        assert (await upload.send(served)).status_code == 201


@pytest.mark.parametrize("kind", UPLOADS)
async def test_upload_with_another_digest_leaves_nothing(tmp_path: Path, kind: str) -> None:
    upload = upload_of(kind, tmp_path)
    async with publishing(tmp_path) as (served, before):
        wrong = await upload.send(served, digest_of(upload.other))
        assert refusal(wrong) == (422, "digest_mismatch")
        await assert_nothing_is_left(served, before)
        assert (await upload.send(served, digest_of(upload.content))).status_code == 201


@pytest.mark.parametrize("kind", UPLOADS)
async def test_one_of_two_uploads_of_a_label_succeeds(tmp_path: Path, kind: str) -> None:
    upload = upload_of(kind, tmp_path)
    async with publishing(tmp_path) as (served, _):
        answers = await asyncio.gather(upload.send(served), upload.send_other(served))
        assert sorted(answer.status_code for answer in answers) == [201, 409]
        (refused,) = (answer for answer in answers if answer.status_code == 409)
        assert refused.json()["code"] == "version_conflict"
        assert not any(".incoming-" in name for name in files(served))
        repeated = [await upload.send(served), await upload.send_other(served)]
        codes = [answer.status_code for answer in repeated]
        assert codes == [200 if answer.status_code == 201 else 409 for answer in answers]


async def test_one_of_two_paths_for_a_label_is_staged(tmp_path: Path) -> None:
    paths = [tmp_path / "sources" / name for name in ("one", "other")]
    for seed, path in enumerate(paths):
        path.mkdir(parents=True)
        (path / "model.safetensors").write_bytes(weights(seed))
    async with publishing(tmp_path) as (served, before):
        post = served.http.post
        answers = await asyncio.gather(
            *(post("/v1/weights/v2", json={"path": str(path)}) for path in paths)
        )
        assert sorted(answer.status_code for answer in answers) == [201, 409]
        assert files(served) == before, "no file is copied"
        assert all((path / "model.safetensors").exists() for path in paths)

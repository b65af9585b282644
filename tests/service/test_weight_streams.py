"""Weights that a client uploads as several files at the same time, to a real server."""

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from safetensors.numpy import load_file

from coppice import AsyncRollouts, Rollouts, VersionConflict
from coppice.weights.checkpoint_files import shards_of
from coppice.weights.tensor_serialization import tensors_of
from service.weights.stager import IncomingFile
from tests.fake_engine import FakeEngine
from tests.service.test_weight_faults import leftovers, versions
from tests.serving import Served, serving

STATE = {f"layer.{n}": np.full(2**16 + n, n, np.float32) for n in range(12)}
STREAMS = 4


def url_of(served: Served) -> str:
    """Address of the server to which the client does not hand files over, unlike a loopback one."""
    return served.url.replace("127.0.0.1", "0.0.0.0")


def tensors_in(folder: Path) -> dict[str, Any]:
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    return {name: tensor for file in files for name, tensor in file.items()}


def check_state(engine: FakeEngine) -> None:
    assert len(list(engine.loaded[0].glob("*.safetensors"))) == STREAMS
    loaded = tensors_in(engine.loaded[0])
    assert loaded.keys() == STATE.keys()
    assert all(np.array_equal(loaded[name], STATE[name]) for name in STATE)


async def test_published_files_are_one_checkpoint(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served, AsyncRollouts(url_of(served)) as client:
        await client.publish_weights("v1", STATE, streams=STREAMS)
        assert not leftovers(served)
        check_state(engine)


async def test_blocking_client_publishes_the_same_files(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        with Rollouts(url_of(served)) as client:
            await asyncio.to_thread(client.publish_weights, "v1", STATE, streams=STREAMS)
        check_state(engine)


async def test_files_that_arrived_before_are_accepted(tmp_path: Path) -> None:
    """A call is repeated after a failure."""
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served, AsyncRollouts(url_of(served)) as client:
        shard = shards_of(tensors_of(STATE), STREAMS)[1]
        content = b"".join(shard.chunks())
        stored = await served.http.put(f"/v1/weights/v1/files/{shard.name}", content=content)
        assert stored.json()["xxh3_128"] == xxhash.xxh3_128_hexdigest(content)
        assert (await client.upload_weights("v1", STATE, streams=STREAMS)).state == "staged"
        await client.activate_weights("v1")
        check_state(engine)


async def test_other_weights_with_the_same_label_are_refused(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served, AsyncRollouts(url_of(served)) as client:
        await client.upload_weights("v1", STATE, streams=STREAMS)
        other = {name: values + 1 for name, values in STATE.items()}
        with pytest.raises(VersionConflict):
            await client.upload_weights("v1", other, streams=STREAMS)
        assert await versions(served) == ["v0", "v1"]
        assert not leftovers(served)
        await client.activate_weights("v1")
        check_state(engine)


async def put_shard(served: Served, label: str) -> None:
    """Uploads one file of several, after which the upload seems to be abandoned."""
    stored = await served.http.put(f"/v1/weights/{label}/files/a.safetensors", content=b"a")
    assert stored.json()["state"] == "incomplete"
    table = served.server.versions
    table.put(replace(table.get(label), received_at=-math.inf))


async def test_abandoned_incomplete_version_is_deleted_by_the_next_upload(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        await put_shard(served, "v1")
        await served.http.put("/v1/weights/v2/files/a.safetensors", content=b"a")
        assert (await served.http.put("/v1/weights/v3", content=b"x")).status_code == 201
        assert await versions(served) == ["v0", "v2", "v3"]
        assert not served.server.checkpoints.folder("v1").exists()


async def test_incomplete_version_whose_next_file_arrives_is_not_abandoned(tmp_path: Path) -> None:
    begun, proceed = asyncio.Event(), asyncio.Event()

    async def chunks() -> AsyncIterator[bytes]:
        begun.set()
        await proceed.wait()
        yield b"b"

    async with serving(FakeEngine(), tmp_path) as served:
        await put_shard(served, "v1")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                served.server.stager.upload(
                    IncomingFile(
                        label="v1", name="b.safetensors", sequence=None, digest=None, sharded=True
                    ),
                    chunks(),
                )
            )
            await begun.wait()
            await served.http.put("/v1/weights/v2", content=b"x")
            proceed.set()
        assert await versions(served) == ["v0", "v1", "v2"]
        assert served.server.versions.get("v1").digests.keys() == {"a.safetensors", "b.safetensors"}

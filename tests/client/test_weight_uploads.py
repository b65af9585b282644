"""Weights that are uploaded as several files at the same time."""

import asyncio
import json
from collections.abc import Coroutine
from itertools import repeat
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import numpy as np
import pytest
import xxhash
from safetensors.numpy import load

from coppice import BadAnswer, WeightsRefused
from coppice.operations.weight_uploads import chunks_until
from coppice.transport.httpx_drivers import AsyncDriver, BlockingDriver, run_sync
from coppice.weights.checkpoint_files import FileImage, shards_of
from coppice.weights.tensor_serialization import HashedChunks, tensors_of
from tests.client.answers import VERSION
from tests.client.app import App, refusing
from tests.client.checkpoints import INDEX, sharded, single
from tests.client.conftest import Connect

STATE = {f"layer.{n}.weight": np.full(100 + n, n, np.float32) for n in range(20)}


def received(request: httpx.Request) -> httpx.Response:
    """Answer with the checksum of the bytes that arrived; the version is complete once."""
    complete = request.url.path.endswith("model-00001-of-00003.safetensors")
    answer = VERSION.model_copy(
        update={
            "xxh3_128": xxhash.xxh3_128_hexdigest(request.content),
            "state": "staged" if complete else "incomplete",
            "missing_files": [] if complete else ["model-00001-of-00003.safetensors"],
        }
    )
    return httpx.Response(201, json=answer.model_dump())


def files_of(app: App) -> dict[str, bytes]:
    assert {request.method for request in app.requests} == {"PUT"}
    found = {request.url.path.rpartition("/")[2]: request.content for request in app.requests}
    assert len(found) == len(app.requests)
    return found


def test_every_tensor_is_in_one_of_the_files(connect: Connect) -> None:
    app = App(received)
    answer = connect(app).upload_weights("v7", STATE, sequence=7, streams=3)
    assert answer.state == "staged"
    assert {request.url.query for request in app.requests} == {b"sequence=7"}
    assert not any("Content-Digest" in request.headers for request in app.requests)
    files = files_of(app)
    index = json.loads(files.pop(INDEX))
    assert sorted(files) == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    tensors = {name: load(content) for name, content in files.items()}
    assert index["weight_map"] == {each: name for name in tensors for each in tensors[name]}
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in STATE.values())
    sent = {name: array for file in tensors.values() for name, array in file.items()}
    assert sent.keys() == STATE.keys()
    assert all(np.array_equal(sent[name], STATE[name]) for name in STATE)


def test_files_are_about_equally_large() -> None:
    *shards, _ = shards_of(tensors_of(STATE), 4)
    sizes = [shard.num_bytes for shard in shards]
    assert max(sizes) - min(sizes) <= max(array.nbytes for array in STATE.values())


def test_fewer_tensors_than_streams_have_fewer_files(connect: Connect) -> None:
    app = App(received)
    connect(app).upload_weights("v7", {"a": np.ones(3), "b": np.ones(0)}, streams=8)
    assert len(files_of(app)) == 3


@pytest.mark.parametrize("write", [single, sharded])
def test_files_are_split_into_the_streams(connect: Connect, tmp_path: Path, write: Any) -> None:
    source = tmp_path / "model.safetensors" if write is single else tmp_path
    write(source)
    app = App(received)
    connect(app).upload_weights("v7", source, streams=2)
    files = files_of(app)
    weight_map = json.loads(files.pop(INDEX))["weight_map"]
    assert len(files) == len(set(weight_map.values())) == min(2, len(weight_map))


def test_refused_file_ends_the_upload(connect: Connect) -> None:
    app = App(refusing("weights_refused", 422))
    with pytest.raises(WeightsRefused):
        connect(app).upload_weights("v7", STATE, streams=3)


def test_file_that_arrives_changed_deletes_the_version(connect: Connect) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "DELETE":
            return httpx.Response(204)
        wrong = VERSION.model_copy(update={"xxh3_128": "0" * 32})
        return httpx.Response(201, json=wrong.model_dump())

    app = App(answer)
    with pytest.raises(BadAnswer):
        connect(app).upload_weights("v7", STATE, streams=2)
    assert (app.requests[-1].method, app.requests[-1].url.path) == ("DELETE", "/v1/weights/v7")
    assert [request.method for request in app.requests].count("DELETE") == 1


@pytest.mark.parametrize(
    "options", [{"streams": 0}, {"streams": 65}, {"streams": 2, "delta": True}]
)
def test_invalid_numbers_of_streams_are_refused(connect: Connect, options: Any) -> None:
    app = App(received)
    with pytest.raises(ValueError, match="streams"):
        connect(app).upload_weights("v7", STATE, **options)
    assert not app.requests


async def fail(begun: Event) -> None:
    assert begun.wait(10)
    raise RuntimeError("first")


async def send_until(stop: Event, begun: Event) -> None:
    endless = FileImage(name="x", num_bytes=0, chunks=lambda: repeat(b"chunk"))
    for _ in chunks_until(stop, endless):
        begun.set()


def test_failure_ends_the_other_threads_with_their_next_chunk() -> None:
    stop, begun = Event(), Event()
    calls: list[Coroutine[Any, Any, None]] = [send_until(stop, begun), fail(begun)]
    with httpx.Client() as client, pytest.raises(RuntimeError, match="first"):
        run_sync(BlockingDriver(client).run_all(calls, stop))


async def test_failure_cancels_the_other_tasks() -> None:
    cancelled = asyncio.Event()

    async def wait() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    async def fail_after_start() -> None:
        await asyncio.sleep(0)
        raise RuntimeError("first")

    async with httpx.AsyncClient() as client:
        with pytest.raises(RuntimeError, match="first"):
            await AsyncDriver(client).run_all([wait(), fail_after_start()], Event())
    assert cancelled.is_set()


def test_pass_that_was_not_completed_has_no_digest() -> None:
    hashed = HashedChunks()
    chunks = hashed.of([b"a", b"b"])
    next(chunks)
    chunks.close()
    assert hashed.digest == b""

"""Weights that a publisher on the server's host hands over in the local directory."""

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from coppice import AsyncRollouts, TimedOut, WeightsRefused
from service.http.errors import PathRefused
from service.weights.local_directory import ABANDONED_SECONDS, LocalUploads
from tests.fake_engine import FakeEngine
from tests.service.weight_replication.replicas import eventually, serves, several
from tests.serving import Served, serving

WEIGHT = np.arange(2**18, dtype=np.float32)
STATE = {"w": WEIGHT, "b": np.ones(3)}


def client_of(served: Served) -> AsyncRollouts:
    return AsyncRollouts(served.url)


async def directory_of(served: Served) -> Path:
    listed = (await served.http.get("/v1/weights")).json()["local_directory"]
    return Path(listed["path"])


async def stage(served: Served, name: str, version: str = "v1") -> Any:
    return await served.http.post(f"/v1/weights/{version}", json={"local_file": name})


async def test_publisher_on_the_same_host_sends_no_bytes(tmp_path: Path) -> None:
    sent: list[tuple[str, int]] = []

    async def note(request: httpx.Request) -> None:
        sent.append((request.method, int(request.headers.get("content-length", 0))))

    engine = FakeEngine()
    async with serving(engine, tmp_path) as served, client_of(served) as client:
        client._sender.driver._driver._client.event_hooks = {"request": [note]}  # type: ignore
        answer = await client.publish_weights("v1", STATE)
        assert answer.version == "v1"
        assert [method for method, _ in sent] == ["GET", "POST", "POST"]
        assert max(num_bytes for _, num_bytes in sent) < 200
        assert (engine.loaded[0] / "model.safetensors").stat().st_size > WEIGHT.nbytes
        assert not list((await directory_of(served)).glob("*.safetensors"))


async def test_file_whose_request_is_cancelled_is_deleted(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        checkpoints = served.server.checkpoints
        (await directory_of(served) / "a.safetensors").write_bytes(b"x")
        taking = asyncio.create_task(checkpoints.take_local("a.safetensors", max_bytes=10))
        await asyncio.sleep(0)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        assert taking.cancelled()
        local = await directory_of(served)
        await eventually(lambda: not list(local.glob("*.safetensors")))
        await eventually(lambda: not list(local.parent.glob(".incoming-*")))


async def test_file_in_the_store_is_sealed(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served, client_of(served) as client:
        await client.publish_weights("v1", STATE)
        status = (engine.loaded[0] / "model.safetensors").stat()
        assert (status.st_mode & 0o777, status.st_nlink) == (0o400, 1)


async def test_repeated_upload_of_weights_that_were_handed_over_is_accepted(
    tmp_path: Path,
) -> None:
    async with serving(FakeEngine(), tmp_path) as served, client_of(served) as client:
        assert (await client.upload_weights("v1", STATE)).sha256 is None
        again = await client.upload_weights("v1", STATE)
        assert (again.version, again.state) == ("v1", "staged")
        assert again.sha256 is not None
        conflict = await served.http.put("/v1/weights/v1", content=b"other")
        assert conflict.status_code == 409


async def test_handed_over_weights_are_a_base_of_deltas(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served, client_of(served) as client:
        await client.upload_weights("v1", STATE)
        await client.upload_weights("v1", STATE, delta=True)
        answer = await client.upload_weights("v2", STATE | {"w": WEIGHT + 1}, delta=True)
        assert answer.base == "v1"


async def test_refused_weights_are_reported_and_deleted(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.refused_weights["v1"] = "w holds NaN"
    async with serving(engine, tmp_path) as served, client_of(served) as client:
        with pytest.raises(WeightsRefused, match="NaN"):
            await client.upload_weights("v1", STATE)
        assert not served.server.checkpoints.folder("v1").exists()
        assert not list((await directory_of(served)).glob("*.safetensors"))


async def test_client_uploads_if_the_server_does_not_take_the_file(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served, client_of(served) as client:
        await client.upload_weights("v1", STATE)
        for path in (await directory_of(served)).iterdir():
            path.unlink()
        (await directory_of(served)).rmdir()
        answer = await client.upload_weights("v2", STATE)
        assert (answer.state, answer.received_bytes) == ("staged", answer.num_bytes)


async def test_directory_with_another_token_is_not_used(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served, client_of(served) as client:
        (await directory_of(served) / ".token").write_text("another")
        assert (await client.upload_weights("v1", STATE)).xxh3_128 is not None


async def test_only_names_of_closed_private_files_are_accepted(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        local, outside = await directory_of(served), tmp_path / "secret.safetensors"
        outside.write_bytes(b"secret")
        (local / "link.safetensors").symlink_to(outside)
        (local / "hard.safetensors").hardlink_to(outside)
        os.mkfifo(local / "fifo.safetensors")
        (local / "folder.safetensors").mkdir()
        with (local / "open.safetensors").open("wb"):
            for name in ("link", "hard", "fifo", "folder", "open", "missing"):
                refused = await stage(served, f"{name}.safetensors")
                assert (refused.status_code, refused.json()["code"]) == (422, "path_refused"), name
                assert str(tmp_path) not in refused.text
        for name in ("../secret.safetensors", ".token", "a/b.safetensors", ""):
            assert (await stage(served, name)).status_code == 422, name
        for body in ({}, {"path": "/x", "local_file": "a.safetensors"}):
            assert (await served.http.post("/v1/weights/v1", json=body)).status_code == 422
        assert outside.read_bytes() == b"secret"
        assert len((await served.http.get("/v1/weights")).json()["versions"]) == 1


async def test_file_beyond_the_size_limit_is_refused_and_deleted(tmp_path: Path) -> None:
    weights = {"max_upload_bytes": 8}
    async with serving(FakeEngine(), tmp_path, weights=weights) as served:
        local = await directory_of(served)
        (local / "large.safetensors").write_bytes(bytes(9))
        assert (await stage(served, "large.safetensors")).status_code == 413
        assert not (local / "large.safetensors").exists()
        assert not list(local.parent.glob(".incoming-*"))


def path_of(uploads: LocalUploads) -> Path:
    directory = uploads.directory
    assert directory is not None, "the file system has leases"
    return Path(directory.path)


def abandoned_file(local: Path, name: str) -> Path:
    """File whose last write is just old enough for its deletion."""
    path = local / f"{name}.safetensors"
    path.write_bytes(b"part")
    last_write = path.stat().st_mtime - ABANDONED_SECONDS - 1
    os.utime(path, (last_write, last_write))
    return path


def test_files_of_publishers_that_ended_are_deleted(tmp_path: Path) -> None:
    uploads = LocalUploads(tmp_path)
    local = path_of(uploads)
    abandoned_file(local, "abandoned")
    (local / "complete.safetensors").write_bytes(b"recent")
    with abandoned_file(local, "written").open("rb+"):
        with pytest.raises(PathRefused):
            uploads.take("missing.safetensors", tmp_path / "taken", max_bytes=1)
        names = sorted(path.name for path in local.glob("*.safetensors"))
        assert names == ["complete.safetensors", "written.safetensors"]


def test_file_that_is_handed_over_late_is_taken(tmp_path: Path) -> None:
    uploads = LocalUploads(tmp_path)
    abandoned_file(path_of(uploads), "late")
    assert uploads.take("late.safetensors", tmp_path / "taken", max_bytes=4) == 4


def test_directory_without_leases_is_not_offered(tmp_path: Path) -> None:
    assert LocalUploads(tmp_path, has_leases=lambda path: False).directory is None


async def test_client_whose_file_was_refused_writes_no_further_one(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served, client_of(served) as client:
        local = await directory_of(served)
        staged: list[str] = []

        async def delete_file(request: httpx.Request) -> None:
            if request.method == "POST":
                staged.append(request.url.path)
                for path in local.glob("*.safetensors"):
                    path.unlink()

        client._sender.driver._driver._client.event_hooks = {"request": [delete_file]}  # type: ignore
        for version in ("v1", "v2"):
            answer = await client.upload_weights(version, STATE)
            assert answer.received_bytes == answer.num_bytes
        assert staged == ["/v1/weights/v1"]


async def test_timeout_of_a_hand_over_is_raised(tmp_path: Path) -> None:
    async def time_out(request: httpx.Request) -> None:
        if request.method == "POST":
            raise httpx.ReadTimeout("no answer", request=request)

    async with serving(FakeEngine(), tmp_path) as served, client_of(served) as client:
        client._sender.driver._driver._client.event_hooks = {"request": [time_out]}  # type: ignore
        with pytest.raises(TimedOut):
            await client.upload_weights("v1", STATE, timeout=1.0)
        assert not list((await directory_of(served)).glob("*.safetensors"))
        assert len((await served.http.get("/v1/weights")).json()["versions"]) == 1


async def test_file_for_a_version_that_exists_is_left_to_its_publisher(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        file = await directory_of(served) / "a.safetensors"
        file.write_bytes(b"w")
        refused = await stage(served, file.name, "v0")
        assert (refused.status_code, refused.json()["code"]) == (409, "version_conflict")
        assert file.read_bytes() == b"w"


async def test_upload_deletes_abandoned_files(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        abandoned = abandoned_file(await directory_of(served), "abandoned")
        assert (await served.http.put("/v1/weights/v1", content=b"w")).status_code == 201
        assert not abandoned.exists()


async def test_version_that_was_handed_over_is_fetched_by_other_replicas(tmp_path: Path) -> None:
    async with several(tmp_path, 2) as (replicas, engines):
        async with AsyncRollouts(replicas[0].url) as client:
            staged = await client.upload_weights("v1", STATE)
            activated = await client.activate_weights("v1")
        assert staged.sha256 is not None
        assert not activated.pending_replicas
        await eventually(lambda: serves(replicas[1], "v1"))
        files = [engine.loaded[0] / "model.safetensors" for engine in engines]
        assert files[0].read_bytes() == files[1].read_bytes()

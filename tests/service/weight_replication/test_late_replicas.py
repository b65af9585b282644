"""A replica that joins late serves the active version, or reports that it cannot."""

import asyncio
from pathlib import Path

import pytest

from service.cluster.in_memory_registry import InMemoryRegistry
from service.cluster.registry import ActivationTarget
from tests.cluster import replica
from tests.fake_engine import FakeEngine
from tests.service.test_rollouts import body, group
from tests.service.test_weight_deltas import put
from tests.service.weight_replication.replicas import (
    NEW,
    OLD,
    Faulty,
    activate,
    eventually,
    fetches,
    is_ready,
    listed,
    loaded,
    sections,
    serves,
    several,
)
from tests.service.weight_replication.stalled_peer import stalled_peer

pytestmark = pytest.mark.slow


async def test_late_joiner_catches_up_before_it_is_ready(tmp_path: Path) -> None:
    directory = InMemoryRegistry()
    async with several(tmp_path, 1, directory) as (one, _):
        for version, content in (("v1", OLD), ("v2", NEW), ("v3", OLD)):
            await put(one[0], version, content)
            if version != "v3":
                await activate(one[0], version)
        engine = FakeEngine()
        async with replica(tmp_path / "late", engine, directory, **sections()) as late:
            assert serves(late, "v2") and loaded(engine) == NEW, "it was ready only then"
            assert late.server.versions.find("v1") is None, "what was passed over is not brought"
            await eventually(lambda: late.server.versions.find("v3") is not None)


async def test_joiner_fetches_nothing_before_its_engine_can_check_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = InMemoryRegistry()
    async with several(tmp_path, 1, directory) as (one, _):
        await put(one[0], "v1", OLD)
        await activate(one[0], "v1")
        engine = FakeEngine()
        engine.start_gate = asyncio.Event()
        async with replica(tmp_path / "late", engine, directory, False, **sections()) as late:
            await eventually(lambda: len(one[0].server.cluster.view.replicas) == 2)
            await asyncio.sleep(0.5)
            assert late.server.versions.find("v1") is None
            engine.start_gate.set()
            await eventually(lambda: is_ready(late))
            assert serves(late, "v1")
    assert "failed" not in caplog.text, "a version that has failed is tried again in ten seconds"


async def test_joiner_without_a_source_is_not_ready_and_reports_why(tmp_path: Path) -> None:
    directory = InMemoryRegistry()
    async with several(tmp_path, 1, directory) as (one, _):
        await put(one[0], "v1", OLD)
        await activate(one[0], "v1")
        alone = sections(peers=(), replication_seconds=3.0)
        async with replica(tmp_path / "late", FakeEngine(), directory, False, **alone) as late:
            probe = await late.http.get("/readyz")
            assert (probe.status_code, probe.json()["detail"]) == (
                503,
                "the weights version of the cluster is not loaded yet",
            )
            for other in ("/livez", "/startupz"):
                assert (await late.http.get(other)).status_code == 200, other
            await eventually(lambda: is_ready(late))
            asked = body(group(1), weights={"min_version": "v1"})
            lagging = await late.http.post("/v1/rollouts", json=asked)
            assert lagging.json()["code"] == "version_unavailable"
            exact = body(group(1), weights={"exact_version": "v1"})
            assert (await late.http.post("/v1/rollouts", json=exact)).status_code == 503
            await eventually(lambda: one[0].server.replication.num_failed() == 1)
            await eventually(lambda: one[0].server.replication.skew() == 1)
            assert one[0].server.replication.num_behind() == 1


async def test_joiner_does_not_wait_past_its_timeout_for_a_stalled_source(
    tmp_path: Path,
) -> None:
    directory = InMemoryRegistry()
    async with stalled_peer() as peer:
        await peer.shows_itself(directory)
        await directory.set_target(ActivationTarget(epoch=1, version="v9"))
        short = sections(replication_seconds=0.5)
        async with replica(tmp_path / "late", FakeEngine(), directory, False, **short) as late:
            await eventually(lambda: is_ready(late))
            assert serves(late, "v0")


async def test_joiner_of_a_flushed_registry_waits_for_the_other_replicas(
    tmp_path: Path,
) -> None:
    directory = Faulty()
    slow = sections() | {"cluster": {"heartbeat_seconds": 1.0, "expire_seconds": 5.0}}
    quick = {"heartbeat_seconds": 0.1, "expire_seconds": 5.0, "redis_url": "redis://nowhere"}
    async with replica(tmp_path / "one", FakeEngine(), directory, **slow) as one:
        await put(one, "v1", OLD)
        await activate(one, "v1")
        await asyncio.sleep(0.2)  # its next heartbeat, which announces again, is a second away
        directory.forget()
        late = replica(tmp_path / "late", FakeEngine(), directory, **slow | {"cluster": quick})
        async with late as joined:
            assert serves(joined, "v1"), "it was ready only then"


async def test_files_changed_after_publication_are_refused(
    tmp_path: Path,
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "model.safetensors").write_bytes(OLD)
    directory = InMemoryRegistry()
    async with several(tmp_path, 1, directory, source_directories=(shared,)) as (one, _):
        await one[0].http.post("/v1/weights/v1", json={"path": str(shared)})
        (shared / "model.safetensors").write_bytes(NEW)
        places = sections(source_directories=(shared,))
        async with replica(tmp_path / "late", FakeEngine(), directory, **places) as late:
            await eventually(lambda: late.server.replication.num_failed() > 0)
            (shown,) = [r for r in (await listed(late))["replicas"] if r["failed"]]
            assert (shown["failed"], shown["staged"]) == ("v1", ["v0"])
            assert str(tmp_path) not in shown["error"]


async def test_bytes_changed_in_transit_are_refused(tmp_path: Path) -> None:
    directory = InMemoryRegistry()
    async with several(tmp_path, 1, directory) as (one, _):
        await put(one[0], "v1", OLD)
        (one[0].server.checkpoints.folder("v1") / "model.safetensors").write_bytes(NEW)
        async with replica(tmp_path / "late", FakeEngine(), directory, **sections()) as late:
            await eventually(lambda: fetches(late, "failed") > 0)
            assert late.server.versions.find("v1") is None
            assert not late.server.checkpoints.folder("v1").exists()

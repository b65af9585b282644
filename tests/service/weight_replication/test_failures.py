"""A failing replica, peer or registry does not block the others."""

import asyncio
from pathlib import Path

import pytest

from engine.errors import EngineDead, LoadFailed
from service.cluster.in_memory_registry import InMemoryRegistry
from service.cluster.registry import Replica
from service.errors import VersionConflict
from service.weights.replication.downloads import READ_TIMEOUT_SECONDS
from tests.service.test_rollouts import body, group
from tests.service.test_weight_deltas import put
from tests.service.weight_replication.replicas import (
    NEW,
    OLD,
    Faulty,
    activate,
    eventually,
    listed,
    serves,
    several,
)
from tests.service.weight_replication.stalled_peer import stalled_peer

pytestmark = pytest.mark.slow


async def test_replica_that_refuses_does_not_block_the_others(tmp_path: Path) -> None:
    async with several(tmp_path, 3) as (replicas, engines):
        engines[2].refused_weights["v1"] = "a holds NaN"
        await put(replicas[0], "v1", OLD)
        answer = await activate(replicas[0], "v1")
        lame = replicas[2].server.cluster.own_id
        assert (answer.status_code, answer.json()["pending_replicas"]) == (200, [lame])
        assert serves(replicas[1], "v1") and serves(replicas[2], "v0")
        (shown,) = [r for r in (await listed(replicas[0]))["replicas"] if r["replica"] == lame]
        assert (shown["failed"], shown["versions_behind"], shown["error"]) == (
            "v1",
            1,
            "a holds NaN",
        )
        # The next version finds the replica healthy again.
        await put(replicas[0], "v2", NEW)
        assert (await activate(replicas[0], "v2")).json()["pending_replicas"] == []
        assert all(serves(served, "v2") for served in replicas)
        assert replicas[0].server.replication.skew() == 0


async def test_replica_whose_engine_dies_during_the_load_does_not_block_the_others(
    tmp_path: Path,
) -> None:
    async with several(tmp_path, 3, replication_seconds=3.0) as (replicas, engines):
        await put(replicas[0], "v1", OLD)
        engines[2].load_error = EngineDead("killed")
        answer = await activate(replicas[0], "v1")
        dead = replicas[2].server.cluster.own_id
        assert (answer.status_code, answer.json()["pending_replicas"]) == (200, [dead])
        assert serves(replicas[0], "v1") and serves(replicas[1], "v1")
        assert engines[2].paused, "half loaded weights never run"
        refused = await replicas[2].http.post("/v1/rollouts", json=body(group(1)))
        assert (refused.status_code, refused.json()["code"]) == (503, "engine_dead")


async def test_unresponsive_replica_is_awaited_no_longer_than_the_timeout(
    tmp_path: Path,
) -> None:
    directory = InMemoryRegistry()
    async with several(tmp_path, 2, directory, replication_seconds=1.0) as (replicas, _):
        ghost = Replica(
            id="ghost", url="http://127.0.0.1:1", state="serving", version="v0", sequence=0
        )
        await directory.beat(ghost, ttl_seconds=600)
        await put(replicas[0], "v1", OLD)
        async with asyncio.timeout(30):
            assert (await activate(replicas[0], "v1")).json()["pending_replicas"][-1:] == ["ghost"]
        await eventually(lambda: serves(replicas[1], "v1"))


async def test_stopping_server_does_not_wait_for_replicas(tmp_path: Path) -> None:
    directory = InMemoryRegistry()
    async with asyncio.timeout(60):
        async with several(tmp_path, 1, directory, replication_seconds=600.0) as (one, engines):
            ghost = Replica(id="ghost", url="", state="serving", version="v0", sequence=0)
            await directory.beat(ghost, ttl_seconds=600)
            await put(one[0], "v1", OLD)
            waiting = asyncio.create_task(
                one[0].server.coordinator.activate("v1", "keep", allow_rollback=False)
            )
            await asyncio.sleep(0.3)
            assert not waiting.done()
        assert (await waiting).pending_replicas == ["ghost"]
        assert one[0].server.cluster.own_id not in directory._replicas


async def test_stopping_server_does_not_wait_for_versions(tmp_path: Path) -> None:
    directory = InMemoryRegistry()
    async with asyncio.timeout(15), stalled_peer() as peer:
        async with several(tmp_path, 1, directory, replication_seconds=600.0) as (one, _):
            await peer.shows_itself(directory)
            await peer.asked.wait()
            server = one[0].server
            waiting = asyncio.create_task(
                server.coordinator.activate("v9", "keep", allow_rollback=False)
            )
            await asyncio.sleep(0.3)
            assert not waiting.done()
        with pytest.raises(VersionConflict, match="in time"):
            await waiting
        assert server.cluster.own_id not in directory._replicas


async def test_missing_version_is_awaited_no_longer_than_the_timeout(
    tmp_path: Path,
) -> None:
    directory = InMemoryRegistry()
    async with (
        asyncio.timeout(15),
        stalled_peer() as peer,
        several(tmp_path, 1, directory, replication_seconds=0.5) as (one, _),
    ):
        await peer.shows_itself(directory)
        await peer.asked.wait()
        refused = await activate(one[0], "v9")
        assert (refused.status_code, refused.json()["code"]) == (409, "version_conflict")
        assert "in time" in refused.json()["detail"]


async def test_missing_version_does_not_block_another_one(tmp_path: Path) -> None:
    directory = InMemoryRegistry()
    async with (
        stalled_peer() as peer,
        several(tmp_path, 2, directory, replication_seconds=2.0) as (replicas, _),
    ):
        await peer.shows_itself(directory)
        await peer.asked.wait()
        async with asyncio.timeout(READ_TIMEOUT_SECONDS / 2):
            assert (await put(replicas[0], "v1", OLD)).status_code == 201
            assert (await activate(replicas[0], "v1")).status_code == 200
            await eventually(lambda: serves(replicas[1], "v1"))
        assert all(served.server.versions.find("v9") is None for served in replicas)


async def test_failed_local_load_is_not_replicated(tmp_path: Path) -> None:
    async with several(tmp_path, 2) as (replicas, engines):
        await put(replicas[0], "v1", OLD)
        engines[0].load_error = LoadFailed("broke off")
        assert (await activate(replicas[0], "v1")).json()["code"] == "activation_failed"
        assert replicas[1].server.cluster.view.target is None
        engines[0].load_error, engines[1].load_error = None, LoadFailed("broke off")
        answer = await activate(replicas[0], "v1")
        assert answer.json()["pending_replicas"] == [replicas[1].server.cluster.own_id]
        assert serves(replicas[0], "v1") and serves(replicas[1], "v0")


async def test_second_of_two_contents_under_one_name_is_not_served(tmp_path: Path) -> None:
    directory = Faulty()
    async with several(tmp_path, 2, directory) as (replicas, engines):
        directory.silent = True
        for served, content in zip(replicas, (OLD, NEW), strict=True):
            assert (await put(served, "v1", content)).status_code == 201
        directory.silent = False
        await eventually(lambda: replicas[0].server.replication.num_failed() == 1)
        first = next(at for at in (0, 1) if replicas[at].server.versions.get("v1").announced)
        answer = await activate(replicas[first], "v1")
        assert answer.json()["pending_replicas"] == [replicas[1 - first].server.cluster.own_id]
        assert not engines[1 - first].loaded


async def test_without_a_registry_weights_activate_locally_and_replicate_later(
    tmp_path: Path,
) -> None:
    directory = Faulty()
    async with several(tmp_path, 2, directory) as (replicas, _):
        await put(replicas[0], "v1", OLD)
        await eventually(lambda: replicas[1].server.versions.find("v1") is not None)
        directory.silent = True
        assert (await activate(replicas[0], "v1")).status_code == 200
        assert serves(replicas[0], "v1") and serves(replicas[1], "v0")
        directory.silent = False
        await eventually(lambda: serves(replicas[1], "v1"))


async def test_after_an_outage_all_replicas_follow_the_winning_target(
    tmp_path: Path,
) -> None:
    directory = Faulty()
    async with several(tmp_path, 2, directory) as (replicas, _):
        for version, content in (("v1", OLD), ("v2", NEW)):
            await put(replicas[0], version, content)
        await eventually(lambda: replicas[1].server.versions.find("v2") is not None)
        directory.silent = True
        for served, version in zip(replicas, ("v1", "v2"), strict=True):
            assert (await activate(served, version)).status_code == 200
        directory.silent = False
        await eventually(lambda: directory.target_version is not None)
        await eventually(lambda: all(serves(r, directory.target_version or "") for r in replicas))


async def test_flushed_registry_is_filled_again(tmp_path: Path) -> None:
    directory = Faulty()
    async with several(tmp_path, 2, directory) as (replicas, _):
        await put(replicas[0], "v1", OLD)
        await activate(replicas[0], "v1")
        await put(replicas[0], "v2", NEW)
        await eventually(lambda: replicas[1].server.versions.find("v2") is not None)
        directory.forget()
        await eventually(lambda: directory._target is not None and "v1" in directory._manifests)
        assert directory._target is not None and directory._target.version == "v1"
        await eventually(lambda: "v2" in directory._manifests)
        assert (await activate(replicas[1], "v2")).json()["pending_replicas"] == []


async def test_registry_flushed_during_a_fetch_is_filled_again(
    tmp_path: Path,
) -> None:
    directory = Faulty()
    async with several(tmp_path, 1, directory) as (one, _):
        await put(one[0], "v1", OLD)
        async with stalled_peer() as peer:
            await peer.shows_itself(directory)
            await peer.asked.wait()
            directory.forget()
            for _ in "ab":
                view = await one[0].server.cluster.refresh()
            assert view.known, "it is not to be seen any more"
            peer.over.set()
            await eventually(lambda: "v1" in directory._manifests)

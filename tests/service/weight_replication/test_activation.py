"""A version sent to one replica is served by all."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engine.errors import LoadFailed
from service.cluster.in_memory_registry import InMemoryRegistry
from service.cluster.registry import (
    ActivationTarget,
    ClusterView,
    Manifest,
    RegistryUnavailable,
    Replica,
)
from service.cluster.replica_status import RETRY_SECONDS
from tests.cluster import fleet, replica
from tests.fake_engine import VOCAB_SIZE, FakeEngine
from tests.redis_server import redis_server
from tests.service.test_rollouts import body, group, running_samples
from tests.service.test_weight_deltas import delta, put
from tests.service.weight_replication.replicas import (
    DIRECTORY,
    NEW,
    OLD,
    Faulty,
    activate,
    eventually,
    fetches,
    listed,
    loaded,
    sections,
    serves,
    several,
)
from tests.serving import Served

pytestmark = pytest.mark.slow


async def test_version_uploaded_once_is_served_by_all(tmp_path: Path) -> None:
    async with several(tmp_path, 3) as (replicas, engines):
        assert (await put(replicas[0], "v1", OLD, sequence=5)).status_code == 201
        answer = await activate(replicas[1], "v1")
        assert (answer.status_code, answer.json()["pending_replicas"]) == (200, [])
        assert all(
            serves(served, "v1") and loaded(e) == OLD
            for served, e in zip(replicas, engines, strict=True)
        )
        assert [fetches(served, "full") for served in replicas] == [0, 1, 1]
        await eventually(lambda: replicas[2].server.replication.num_behind() == 0)
        shown = await listed(replicas[2])
        assert (shown["active"], shown["target_version"], len(shown["replicas"])) == ("v1", "v1", 3)
        for each in shown["replicas"]:
            assert (each["version"], each["versions_behind"], each["failed"]) == ("v1", 0, None)
        assert (await activate(replicas[2], "v1")).json()["pending_replicas"] == [], (
            "again changes nothing"
        )
        assert [engine.calls.count("swap v1") for engine in engines] == [1, 1, 1]
        asked = body(group(1), weights={"min_version": "v1"})
        for served in replicas:
            assert (await served.http.post("/v1/rollouts", json=asked)).status_code == 200


async def test_all_replicas_keep_the_kv_of_sessions_if_the_activation_does(tmp_path: Path) -> None:
    async with several(tmp_path, 2) as (replicas, engines):
        await put(replicas[0], "v1", OLD)
        answer = await activate(replicas[0], "v1", kv="keep_running")
        assert (answer.status_code, answer.json()["pending_replicas"]) == (200, [])
        assert [engine.calls.count("swap v1 keep_kv") for engine in engines] == [1, 1]


@pytest.mark.parametrize("last", ["v2", "v0"])
async def test_replica_that_skipped_an_activation_resets_its_kv(tmp_path: Path, last: str) -> None:
    """It may have been the one that reset the KV, also if it ends with the version that it had."""
    async with several(tmp_path, 2, replication_seconds=1.0) as (replicas, engines):
        first, second = replicas
        assert (await second.http.post("/v1/sleep", json={})).status_code == 200
        for version, content in (("v1", OLD), ("v2", NEW)):
            await put(first, version, content)
        await activate(first, "v1")
        assert (await activate(first, last, kv="keep_running", allow_rollback=True)).is_success
        num_resets = engines[1].calls.count("forget")
        assert (await second.http.post("/v1/wake", json={})).is_success
        await eventually(lambda: second.server.cluster.view.replicas[_id(second)].epoch == 2)
        assert f"swap {last} keep_kv" in engines[0].calls
        swaps = [call for call in engines[1].calls if call.startswith("swap")]
        num_resets = engines[1].calls.count("forget") - num_resets
        assert (swaps, num_resets) == ((["swap v2"], 0) if last == "v2" else ([], 1))


async def test_replica_that_waits_for_samples_follows_a_newer_activation(tmp_path: Path) -> None:
    async with several(tmp_path, 2) as (replicas, engines):
        first, second = replicas
        for version, content in (("v1", OLD), ("v2", NEW)):
            await put(first, version, content)
        await eventually(lambda: second.server.versions.find("v2") is not None)
        engines[1].instant = False
        rollout = asyncio.create_task(second.http.post("/v1/rollouts", json=body(group(1))))
        await running_samples(second, 1)
        waiting = asyncio.create_task(activate(first, "v1", mode="wait"))
        await eventually(lambda: serves(first, "v1") and not second.server.rollouts._gate.is_set())
        answer = await activate(first, "v2")
        assert (answer.status_code, answer.json()["pending_replicas"]) == (200, [])
        assert serves(second, "v2") and len(engines[1].running) == 1
        assert (await waiting).is_success
        engines[1].step(VOCAB_SIZE)
        assert (await rollout).is_success


@asynccontextmanager
async def sampling_replicas(
    tmp_path: Path, registry: InMemoryRegistry | None = None
) -> AsyncIterator[tuple[list[Served], FakeEngine]]:
    """Two replicas with v1, v2 and v3, and the second one's engine, in which a sample runs."""
    async with several(tmp_path, 2, registry, replication_seconds=0.5) as (replicas, engines):
        first, second = replicas
        for version, content in (("v1", OLD), ("v2", NEW), ("v3", OLD)):
            await put(first, version, content)
        await eventually(lambda: second.server.versions.find("v3") is not None)
        engines[1].instant = False
        rollout = asyncio.create_task(second.http.post("/v1/rollouts", json=body(group(1))))
        await running_samples(second, 1)
        yield replicas, engines[1]
        engines[1].step(VOCAB_SIZE)
        assert (await rollout).is_success


async def test_retry_of_an_older_target_does_not_replace_an_activation_that_waits(
    tmp_path: Path,
) -> None:
    async with sampling_replicas(tmp_path) as ((first, second), engine):
        assert (await activate(first, "v1", mode="wait")).is_success
        status = second.server._cluster.replica_status
        newer = asyncio.create_task(activate(second, "v2", mode="wait"))
        await eventually(lambda: status.failed == "v1")
        status._retry_at.clear()  # the time of the retry
        for _ in range(3):
            await second.server.cluster.refresh()
            await asyncio.sleep(0.05)
        assert not newer.done()
        engine.step(VOCAB_SIZE)
        assert (await newer).is_success
        assert serves(second, "v2")
        await eventually(lambda: serves(first, "v2"))


class SlowAnswer(InMemoryRegistry):
    """Sets the target at once, and answers while `answers` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()
        self.answers.set()

    async def set_target(self, target: ActivationTarget) -> ActivationTarget:
        current = await super().set_target(target)
        await self.answers.wait()
        return current


async def test_own_target_does_not_replace_a_later_activation_that_waits(tmp_path: Path) -> None:
    registry = SlowAnswer()
    async with sampling_replicas(tmp_path, registry) as ((_, second), engine):
        registry.answers.clear()
        earlier = asyncio.create_task(activate(second, "v1"))
        await eventually(lambda: serves(second, "v1"))
        later = asyncio.create_task(activate(second, "v2", mode="wait"))
        await eventually(lambda: not second.server.rollouts._gate.is_set())
        for _ in range(3):
            await second.server.cluster.refresh()
            await asyncio.sleep(0.05)
        assert not later.done()
        registry.answers.set()
        assert (await earlier).is_success
        engine.step(VOCAB_SIZE)
        assert (await later).is_success


async def test_replica_that_failed_to_activate_resets_its_kv_at_the_next_activation(
    tmp_path: Path,
) -> None:
    async with several(tmp_path, 2) as (replicas, engines):
        engines[1].load_error = LoadFailed("no")
        await put(replicas[0], "v1", OLD)
        answer = await activate(replicas[0], "v1")
        assert answer.json()["pending_replicas"] == [_id(replicas[1])]
        engines[1].load_error = None
        await put(replicas[1], "v2", NEW)
        assert (await activate(replicas[1], "v2", kv="keep_running")).is_success
        assert engines[0].calls.count("swap v2 keep_kv") == 1
        assert engines[1].calls.count("swap v2") == 1


async def test_replica_that_activated_during_a_partition_resets_its_kv_at_the_next_activation(
    tmp_path: Path,
) -> None:
    """Its own target has the epoch of one that it has missed, and which was a reset."""
    registry = Partitioned()
    async with several(tmp_path, 2, registry, replication_seconds=1.0) as (replicas, engines):
        first, second = replicas
        await activate_in_partition(registry, second)
        for version, kv in (("v2", "reset"), ("v3", "keep_running")):
            await put(first, version, NEW)
            assert (await activate(first, version, kv=kv)).is_success
        registry.cut = ""
        await eventually(lambda: serves(second, "v3"))
        swaps = [call for call in engines[1].calls if call.startswith("swap")]
        assert swaps == ["swap v1 keep_kv", "swap v3"]
        assert engines[0].calls.count("swap v3 keep_kv") == 1


@pytest.mark.parametrize("num_missed", [1, 2])
async def test_missed_reset_of_a_version_that_is_active_here_is_made_up_for(
    tmp_path: Path, num_missed: int
) -> None:
    """Its own target has the epoch and the version of the missed one."""
    registry = Partitioned()
    async with several(tmp_path, 2, registry, replication_seconds=1.0) as (replicas, engines):
        first, second = replicas
        await activate_in_partition(registry, second)
        for version, content, kv in (("v1", OLD, "reset"), ("v2", NEW, "keep_running"))[
            :num_missed
        ]:
            await put(first, version, content)
            assert (await activate(first, version, kv=kv)).is_success
        calls = engines[1].calls
        calls.clear()
        registry.cut = ""
        expected = "forget" if num_missed == 1 else "swap v2"
        await eventually(lambda: expected in calls)
        assert "swap v2 keep_kv" not in calls


class Partitioned(Faulty):
    """Does not respond to the heartbeats of the replica `cut`."""

    cut = ""

    async def beat(self, replica: Replica, *, ttl_seconds: float) -> ClusterView:
        if replica.id == self.cut:
            raise RegistryUnavailable("cut")
        return await super().beat(replica, ttl_seconds=ttl_seconds)


async def activate_in_partition(registry: Partitioned, replica: Served) -> None:
    """Have a replica activate v1 and keep its KV, then disconnect it from the others."""
    registry.silent = True
    await put(replica, "v1", OLD)
    assert (await activate(replica, "v1", kv="keep_running")).is_success
    registry.silent, registry.cut = False, _id(replica)


def _id(served: Served) -> str:
    return served.server.cluster.own_id


class Recording(InMemoryRegistry):
    """Records which replicas had the files of each version when it was published."""

    def __init__(self) -> None:
        super().__init__()
        self.listed: dict[str, Replica] = {}
        self.givers: dict[str, list[str]] = {}

    async def beat(self, replica: Replica, *, ttl_seconds: float) -> ClusterView:
        self.listed[replica.id] = replica
        return await super().beat(replica, ttl_seconds=ttl_seconds)

    async def publish(self, manifest: Manifest) -> None:
        named = [name for name, each in self.listed.items() if manifest.version in each.holds]
        self.givers[manifest.version] = named
        await super().publish(manifest)


async def test_replica_that_learns_of_a_version_finds_a_source_of_its_files(tmp_path: Path) -> None:
    directory = Recording()
    async with several(tmp_path, 2, directory) as (replicas, _):
        assert (await put(replicas[0], "v1", OLD, sequence=1)).status_code == 201
        assert (await put(replicas[1], "v2", NEW, sequence=2)).status_code == 201
        assert directory.givers["v1"] == [replicas[0].server.cluster.own_id]
        assert replicas[1].server.cluster.own_id in directory.givers["v2"]
        await eventually(lambda: replicas[0].server.versions.find("v2") is not None)
        assert [fetches(served, "failed") for served in replicas] == [0, 0]


async def test_delta_upload_is_replicated_as_a_delta(tmp_path: Path) -> None:
    async with several(tmp_path, 2) as (replicas, engines):
        await put(replicas[0], "v1", OLD)
        await activate(replicas[0], "v1")
        sent = delta(tmp_path, OLD, NEW)
        assert (await put(replicas[0], "v2", sent, base="v1")).status_code == 201
        assert (await activate(replicas[0], "v2")).json()["pending_replicas"] == []
        assert [loaded(engine) for engine in engines] == [NEW, NEW]
        assert fetches(replicas[1], "delta") == 1
        (known,) = [v for v in (await listed(replicas[1]))["versions"] if v["version"] == "v2"]
        assert (known["base"], known["received_bytes"]) == ("v1", len(sent))


async def test_shared_directory_is_read_by_all(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    (shared / "step-1").mkdir(parents=True)
    (shared / "step-1" / "model.safetensors").write_bytes(OLD)
    async with several(tmp_path, 2, source_directories=(shared,), peers=()) as (replicas, engines):
        path = {"path": str(shared / "step-1")}
        assert (await replicas[0].http.post("/v1/weights/v1", json=path)).status_code == 201
        assert (await activate(replicas[1], "v1")).json()["pending_replicas"] == []
        assert [loaded(engine) for engine in engines] == [OLD, OLD]
        assert fetches(replicas[1], "path") == 1


async def test_files_changed_after_staging_are_activated_by_no_replica(
    tmp_path: Path,
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "model.safetensors").write_bytes(OLD)
    async with several(tmp_path, 2, source_directories=(shared,)) as (replicas, engines):
        await replicas[0].http.post("/v1/weights/v1", json={"path": str(shared)})
        await eventually(lambda: replicas[1].server.versions.find("v1") is not None)
        (shared / "model.safetensors").write_bytes(NEW)
        for served in replicas:
            refused = await activate(served, "v1")
            assert (refused.status_code, refused.json()["code"]) == (422, "weights_refused")
        assert not any(engine.loaded for engine in engines)


async def test_sharded_version_is_replicated(tmp_path: Path) -> None:
    index = b'{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}'
    files = {
        "model.safetensors.index.json": index,
        "one.safetensors": b"1",
        "two.safetensors": b"2",
    }
    async with several(tmp_path, 2) as (replicas, engines):
        for name, content in files.items():
            await replicas[0].http.put(f"/v1/weights/v1/files/{name}", content=content)
        assert (await activate(replicas[0], "v1")).json()["pending_replicas"] == []
        folder = engines[1].loaded[-1]
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


async def test_replicated_shards_are_removed_with_their_version(
    tmp_path: Path,
) -> None:
    index = b'{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}'
    directory = InMemoryRegistry()
    async with several(tmp_path, 1, directory) as (one, _):
        for name, content in (
            ("model.safetensors.index.json", index),
            ("one.safetensors", b"1"),
            ("two.safetensors", b"2"),
        ):
            await one[0].http.put(f"/v1/weights/v1/files/{name}", content=content)
        (one[0].server.checkpoints.folder("v1") / "two.safetensors").write_bytes(b"3")
        async with replica(tmp_path / "late", FakeEngine(), directory, **sections()) as late:
            await eventually(lambda: fetches(late, "failed") > 0)
            folder = late.server.checkpoints.folder("v1")
            assert {path.name for path in folder.iterdir()} >= {"one.safetensors"}
            assert (await one[0].http.delete("/v1/weights/v1")).status_code == 204
            await eventually(lambda: not folder.exists())
            assert late.server.versions.find("v1") is None


async def test_rollback_is_replicated(tmp_path: Path) -> None:
    async with several(tmp_path, 2) as (replicas, engines):
        for version, content in (("v1", OLD), ("v2", NEW)):
            await put(replicas[0], version, content)
            await activate(replicas[0], version)
        assert (await activate(replicas[1], "v1")).json()["code"] == "rollback_refused"
        back = await activate(replicas[1], "v1", allow_rollback=True)
        assert back.json()["pending_replicas"] == []
        assert [loaded(engine) for engine in engines] == [OLD, OLD]


async def test_replicas_never_have_two_contents_under_one_name(tmp_path: Path) -> None:
    async with several(tmp_path, 2) as (replicas, _):
        await put(replicas[0], "v1", OLD)
        for version, content, sequence in (("v1", NEW, 1), ("other", NEW, 1)):
            refused = await put(replicas[1], version, content, sequence=sequence)
            assert (refused.status_code, refused.json()["code"]) == (409, "version_conflict")
        await eventually(lambda: replicas[1].server.versions.find("v1") is not None)
        assert (await put(replicas[1], "next", NEW)).json()["sequence"] == 2


async def test_identical_bytes_are_one_version_whatever_their_source(tmp_path: Path) -> None:
    async with several(tmp_path, 2) as (replicas, _):
        await put(replicas[0], "v1", OLD)
        await activate(replicas[0], "v1")
        assert (await put(replicas[0], "v2", delta(tmp_path, OLD, NEW), base="v1")).is_success
        again = await put(replicas[1], "v2", NEW)
        assert (again.is_success, again.json()["sequence"]) == (True, 2)


async def test_deletion_is_replicated(tmp_path: Path) -> None:
    async with several(tmp_path, 2) as (replicas, _):
        await put(replicas[0], "v1", OLD)
        await eventually(lambda: replicas[1].server.versions.find("v1") is not None)
        folder = replicas[0].server.checkpoints.folder("v1")
        assert (await replicas[1].http.delete("/v1/weights/v1")).status_code == 204
        await eventually(lambda: not folder.exists())
        assert all(served.server.versions.find("v1") is None for served in replicas)


async def test_deleted_name_may_be_reused(tmp_path: Path) -> None:
    async with several(tmp_path, 2) as (replicas, engines):
        await put(replicas[0], "v1", OLD)
        await eventually(lambda: replicas[1].server.versions.find("v1") is not None)
        assert (await replicas[0].http.delete("/v1/weights/v1")).status_code == 204
        assert (await put(replicas[0], "v1", NEW)).status_code == 201
        assert (await activate(replicas[0], "v1")).status_code == 200
        await eventually(lambda: serves(replicas[1], "v1"), ttl_seconds=RETRY_SECONDS / 2)
        assert [loaded(engine) for engine in engines] == [NEW, NEW]


async def test_replication_works_over_redis(tmp_path: Path) -> None:
    engines = [FakeEngine(), FakeEngine()]
    with redis_server(tmp_path) as redis:
        directory = {**DIRECTORY, "redis_url": redis.url, "call_seconds": 5.0}
        shared = sections(replication_seconds=5.0) | {"cluster": directory}
        async with fleet(tmp_path, engines, lambda: None, **shared) as replicas:
            await put(replicas[0], "v1", OLD)
            await activate(replicas[0], "v1")
            sent = delta(tmp_path, OLD, NEW)
            await put(replicas[1], "v2", sent, base="v1")
            assert (await activate(replicas[0], "v2")).json()["pending_replicas"] == []
            assert [loaded(engine) for engine in engines] == [NEW, NEW]
            redis.flush()
            late = FakeEngine()
            await replicas[0].server.cluster.refresh()  # to forget the activation target
            await eventually(lambda: replicas[0].server.cluster.view.target is not None)
            async with replica(tmp_path / "late", late, None, **shared) as third:
                await eventually(lambda: serves(third, "v2"))
                assert loaded(late) == NEW


async def test_sleeping_replica_follows_once_its_weights_are_awake(tmp_path: Path) -> None:
    async with several(tmp_path, 2, replication_seconds=1.0) as (replicas, engines):
        first, second = replicas
        assert (await second.http.post("/v1/sleep", json={})).status_code == 200
        await first.http.put("/v1/weights/v1", content=OLD)
        answer = (await activate(first, "v1")).json()
        assert answer["pending_replicas"] == [second.server.cluster.own_id]
        (behind,) = (one for one in (await listed(first))["replicas"] if one["version"] == "v0")
        assert behind["failed"] is None
        await second.http.post("/v1/wake", json={"tags": ["weights"]})
        await eventually(lambda: engines[1].version == "v1")
        assert engines[1].sleeping == {"kv_cache"}
        assert (await second.http.post("/v1/wake", json={})).json()["paused"] is False

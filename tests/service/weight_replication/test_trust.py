"""Untrusted registry entries and requests have no effect; replicas authenticate each other."""

from pathlib import Path

import pytest

from service.cluster.in_memory_registry import InMemoryRegistry
from service.cluster.registry import ActivationTarget, Manifest, ManifestFile, Replica
from tests.cluster import replica
from tests.fake_engine import FakeEngine
from tests.service.keyfile import bearer, write_keys
from tests.service.test_weight_deltas import put
from tests.service.weight_replication.replicas import (
    NEW,
    OLD,
    activate,
    eventually,
    listed,
    sections,
    serves,
    several,
)

pytestmark = pytest.mark.slow
BAD_FILES = [
    ManifestFile(name="../model.safetensors", sha256="0" * 64, num_bytes=1),
    ManifestFile(name="model.py", sha256="0" * 64, num_bytes=1),
    ManifestFile(name="model.safetensors", sha256="x", num_bytes=1),
    ManifestFile(name="model.safetensors", sha256="0" * 64, num_bytes=2**60),
]


@pytest.mark.parametrize(
    "manifest",
    [
        *(Manifest(version="v1", sequence=1, files=(file,)) for file in BAD_FILES),
        Manifest(version="../v1", sequence=1, files=()),
        Manifest(version="v1", sequence=1, files=(), path="/etc"),
    ],
)
async def test_foreign_registry_entries_have_no_effect(tmp_path: Path, manifest: Manifest) -> None:
    directory = InMemoryRegistry()
    async with several(tmp_path, 1, directory) as (one, engines):
        folder = one[0].server.checkpoints.folder("x").parent
        before = set(folder.rglob("*"))
        liar = Replica(
            id="liar",
            url="http://127.0.0.1:9",
            state="serving",
            version="v0",
            sequence=0,
            holds=(manifest.version,),
        )
        await directory.beat(liar, ttl_seconds=600)
        await directory.publish(manifest)
        await directory.set_target(ActivationTarget(epoch=1, version=manifest.version))
        await eventually(lambda: one[0].server.replication.num_failed() == 1)
        assert serves(one[0], "v0") and not engines[0].loaded
        assert set(folder.rglob("*")) == before


async def test_replica_at_unlisted_address_receives_no_request(tmp_path: Path) -> None:
    directory = InMemoryRegistry()
    async with (
        several(tmp_path, 1, directory, peers=("http://10.0.0.0/8:80",)) as (one, _),
        replica(tmp_path / "late", FakeEngine(), directory, **sections()) as late,
    ):
        await put(late, "v1", OLD)
        await eventually(lambda: one[0].server.replication.num_failed() > 0)
        (shown,) = [r for r in (await listed(one[0]))["replicas"] if r["failed"]]
        assert (
            shown["error"]
            == "no other replica at an address that weights.peers allows has the files"
        )
        metrics = (await late.http.get("/metrics")).text
        assert "files/{name}" not in metrics, "nobody has asked"


@pytest.mark.parametrize("name", ["model.safetensors", "delta.safetensors", ".delta", "..%2Fx"])
async def test_only_uploaded_files_are_served(tmp_path: Path, name: str) -> None:
    async with several(tmp_path, 1) as (one, _):
        await put(one[0], "v1", OLD)
        for version in ("v0", "v1", "unknown"):
            answer = await one[0].http.get(f"/v1/weights/{version}/files/{name}")
            if (version, name) == ("v1", "model.safetensors"):
                assert answer.content == OLD
            else:
                assert (answer.status_code, answer.headers["content-type"]) == (
                    404,
                    "application/problem+json",
                )


async def test_replicas_authenticate_with_the_peer_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    secrets = write_keys(keys, admin="admin", peers="replica", trainer="rollout")
    key = tmp_path / "peer-key"
    key.write_text("wrong\n")
    locked = sections(peer_key_file=key) | {"server": {"keys_file": keys}}
    directory = InMemoryRegistry()
    async with (
        replica(tmp_path / "0", FakeEngine(), directory, **locked) as one,
        replica(tmp_path / "1", FakeEngine(), directory, **locked) as two,
    ):
        for served in (one, two):
            served.http.headers.update(bearer(secrets["admin"]))
        await put(one, "v1", OLD)
        await eventually(lambda: one.server.replication.num_failed() > 0)
        (shown,) = [r for r in (await listed(one))["replicas"] if r["failed"]]
        assert shown["error"] == f"from {one.server.cluster.own_id}: HTTP status 401"
        file = "/v1/weights/v1/files/model.safetensors"
        for name, status in (("admin", 403), ("trainer", 403), ("peers", 200)):
            answer = await one.http.get(file, headers=bearer(secrets[name]))
            assert answer.status_code == status, name
        key.write_text(f"{secrets['peers']}\n")  # reread, since keys are rotated
        await put(one, "v2", NEW)
        assert (await activate(one, "v2")).json()["pending_replicas"] == []

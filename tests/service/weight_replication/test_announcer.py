"""Announcements checked against a registry view by the time at which its read began."""

from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from service.cluster.membership import ClusterMembership
from service.cluster.registry import ClusterView, Manifest, Replica
from service.cluster.replica_status import ReplicaStatus
from service.config.cluster import ClusterSettings
from service.observability.metrics import ClusterMetrics
from service.readiness import Readiness
from service.weights.replication.announcer import Announcer
from service.weights_versions import Version, Versions, first_version
from tests.fake_engine import FakeEngine
from tests.service.weight_replication.replicas import Faulty

ME = Replica(id="a" * 12, url="http://a", state="serving", version="v0", sequence=0)


class Recording(Faulty):
    """Records the versions that are published."""

    def __init__(self) -> None:
        super().__init__()
        self.published: list[str] = []

    async def publish(self, manifest: Manifest) -> None:
        self.published.append(manifest.version)
        await super().publish(manifest)


class OneReplica:
    """One replica that has v1, and its announcements."""

    def __init__(self, folder: Path) -> None:
        (folder / "model.safetensors").touch()
        self.v1 = Version(
            label="v1",
            sequence=1,
            state="staged",
            path=folder,
            num_bytes=0,
            owned=True,
            digests={"model.safetensors": "0" * 64},
        )
        self.registry = Recording()
        self.cluster = ClusterMembership(
            self.registry,
            ClusterSettings(),
            ClusterMetrics(CollectorRegistry()),
            describe=lambda: ME,
        )
        self.versions = Versions(first_version("v0"))
        status = ReplicaStatus(ME.id, ME.url, Readiness(FakeEngine()), self.versions)
        self.announcer = Announcer(self.cluster, self.versions, status)
        self.cluster.on_view = self.announcer.on_view


@pytest.fixture
def here(tmp_path: Path) -> OneReplica:
    return OneReplica(tmp_path)


async def test_view_read_before_the_announcement_is_ignored(here: OneReplica) -> None:
    before = await here.cluster.refresh()
    assert not here.announcer.is_outdated(before, "v1")
    await here.announcer.announce(here.v1)
    assert here.announcer.is_outdated(before, "v1")
    assert here.announcer.is_outdated(here.cluster.view, "v1"), (
        "the heartbeat precedes the publication"
    )
    after = await here.cluster.refresh()
    assert "v1" in after.manifests and not here.announcer.is_outdated(after, "v1")


async def test_locally_deleted_version_is_absent_although_an_older_view_lists_it(
    here: OneReplica,
) -> None:
    await here.announcer.announce(here.v1)
    view = await here.cluster.refresh()
    assert "v1" in view.manifests and not here.announcer.is_outdated(view, "v1")
    await here.announcer.on_deleted("v1")
    assert here.announcer.is_outdated(view, "v1")
    await here.announcer.announce(here.v1)
    assert not here.announcer.is_outdated(await here.cluster.refresh(), "v1")


async def test_older_complete_view_does_not_end_a_loss(here: OneReplica) -> None:
    await here.announcer.announce(here.v1)
    here.versions.put(replace(here.v1, announced=True))
    complete: ClusterView = await here.cluster.refresh()
    await here.announcer.sync(complete)
    assert here.registry.published == ["v1"] and not here.announcer.needs_reannounce
    here.registry.forget()
    empty = await here.cluster.refresh()
    await here.announcer.sync(complete)
    assert here.announcer.needs_reannounce, "the versions from before the loss were announced"
    await here.announcer.sync(empty)
    assert here.registry.published == ["v1", "v1"] and not here.announcer.needs_reannounce

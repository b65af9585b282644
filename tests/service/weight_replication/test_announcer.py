"""Announcements checked against a registry view by the time at which its read began."""

from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from service.cluster.membership import ClusterMembership
from service.cluster.registry import ClusterView, Replica
from service.config.cluster import ClusterSettings
from service.observability.metrics import ClusterMetrics
from service.versions import Version, Versions, first_version
from service.weights.replication.announcer import Announcer
from tests.service.weight_replication.replicas import Faulty

ME = Replica(id="a" * 12, url="http://a", state="serving", version="v0", sequence=0)


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
        self.registry = Faulty()
        self.cluster = ClusterMembership(
            self.registry,
            ClusterSettings(),
            ClusterMetrics(CollectorRegistry()),
            describe=lambda: ME,
        )
        self.versions = Versions(first_version("v0"))
        self.announcer = Announcer(self.cluster, self.versions)
        self.announced: list[str] = []

    async def announce_one(self, version: Version) -> bool:
        self.announced.append(version.label)
        return await self.announcer.announce(version)


@pytest.fixture
def here(tmp_path: Path) -> OneReplica:
    return OneReplica(tmp_path)


async def test_view_read_before_the_announcement_is_ignored(here: OneReplica) -> None:
    before = await here.cluster.refresh()
    assert not here.announcer.predates_announcement(before, "v1")
    await here.announcer.announce(here.v1)
    assert here.announcer.predates_announcement(before, "v1")
    assert here.announcer.predates_announcement(here.cluster.view, "v1"), (
        "the heartbeat precedes the publication"
    )
    after = await here.cluster.refresh()
    assert "v1" in after.manifests and not here.announcer.predates_announcement(after, "v1")


async def test_locally_deleted_version_is_absent_although_an_older_view_lists_it(
    here: OneReplica,
) -> None:
    await here.announcer.announce(here.v1)
    view = await here.cluster.refresh()
    assert "v1" in view.manifests and not here.announcer.is_withdrawn(view, "v1")
    await here.announcer.on_deleted("v1")
    assert here.announcer.is_withdrawn(view, "v1")
    await here.announcer.announce(here.v1)
    assert not here.announcer.is_withdrawn(await here.cluster.refresh(), "v1")


async def test_older_complete_view_does_not_end_a_loss(here: OneReplica) -> None:
    await here.announcer.announce(here.v1)
    here.versions.put(replace(here.v1, announced=True))
    complete: ClusterView = await here.cluster.refresh()
    await here.announcer.sync(complete, here.announce_one)
    assert not here.announced and not here.announcer.needs_reannounce
    here.registry.forget()
    empty = await here.cluster.refresh()
    await here.announcer.sync(complete, here.announce_one)
    assert here.announcer.needs_reannounce, "the versions from before the loss were announced"
    await here.announcer.sync(empty, here.announce_one)
    assert here.announced == ["v1"] and not here.announcer.needs_reannounce

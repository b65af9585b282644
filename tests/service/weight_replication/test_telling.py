"""Announcements checked against a registry view by the time at which its read began."""

from dataclasses import replace
from pathlib import Path

import pytest

from service.cluster.membership import ClusterMembership
from service.cluster.registry import ClusterView, Replica
from service.cluster.settings import DirectorySettings
from service.weights.replication.announcer import Announcer
from service.weights.versions import Version, Versions, first_version
from tests.service.weight_replication.several import Faulty

ME = Replica(id="a" * 12, url="http://a", state="serving", version="v0", sequence=0)


class Here:
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
        self.directory = Faulty()
        self.fleet = ClusterMembership(
            self.directory,
            DirectorySettings(),
            describe=lambda: ME,
            failed=lambda _: None,
            on_unshared_key=lambda: None,
        )
        self.versions = Versions(first_version("v0"))
        self.telling = Announcer(self.fleet, self.versions)
        self.told: list[str] = []

    async def told_of(self, version: Version) -> bool:
        self.told.append(version.label)
        return await self.telling.announce(version)


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here(tmp_path)


async def test_view_read_before_the_announcement_is_ignored(here: Here) -> None:
    before = await here.fleet.refresh()
    assert not here.telling.predates_announcement(before, "v1")
    await here.telling.announce(here.v1)
    assert here.telling.predates_announcement(before, "v1")
    assert here.telling.predates_announcement(here.fleet.view, "v1"), "it says first what it has"
    after = await here.fleet.refresh()
    assert "v1" in after.manifests and not here.telling.predates_announcement(after, "v1")


async def test_locally_deleted_version_is_absent_although_an_older_view_lists_it(
    here: Here,
) -> None:
    await here.telling.announce(here.v1)
    shown = await here.fleet.refresh()
    assert "v1" in shown.manifests and not here.telling.is_withdrawn(shown, "v1")
    await here.telling.on_deleted("v1")
    assert here.telling.is_withdrawn(shown, "v1")
    await here.telling.announce(here.v1)
    assert not here.telling.is_withdrawn(await here.fleet.refresh(), "v1")


async def test_older_complete_view_does_not_end_a_loss(here: Here) -> None:
    await here.telling.announce(here.v1)
    here.versions.put(replace(here.v1, announced=True))
    whole: ClusterView = await here.fleet.refresh()
    await here.telling.sync(whole, here.told_of)
    assert not here.told and not here.telling.needs_reannounce
    here.directory.forget()
    empty = await here.fleet.refresh()
    await here.telling.sync(whole, here.told_of)
    assert here.telling.needs_reannounce, "the versions from before the loss were announced"
    await here.telling.sync(empty, here.told_of)
    assert here.told == ["v1"] and not here.telling.needs_reannounce

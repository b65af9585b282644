"""What a look at the directory says of what was told from here, by when it began."""

from dataclasses import replace
from pathlib import Path

import pytest

from service.cluster.membership import Fleet
from service.cluster.registry import Replica, Sight
from service.cluster.settings import DirectorySettings
from service.weights.replication.announcer import Telling
from service.weights.versions import Version, Versions, first_version
from tests.service.fleet_weights.several import Faulty

ME = Replica(id="a" * 12, url="http://a", state="serving", version="v0", sequence=0)


class Here:
    """One replica that has v1, and what it has told."""

    def __init__(self, home: Path) -> None:
        (home / "model.safetensors").touch()
        self.v1 = Version(
            label="v1",
            sequence=1,
            state="staged",
            path=home,
            num_bytes=0,
            owned=True,
            digests={"model.safetensors": "0" * 64},
        )
        self.directory = Faulty()
        self.fleet = Fleet(
            self.directory,
            DirectorySettings(),
            describe=lambda: ME,
            failed=lambda _: None,
            unshared=lambda: None,
        )
        self.versions = Versions(first_version("v0"))
        self.telling = Telling(self.fleet, self.versions)
        self.told: list[str] = []

    async def told_of(self, version: Version) -> bool:
        self.told.append(version.label)
        return await self.telling.announce(version)


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here(tmp_path)


async def test_a_look_that_began_before_it_was_told_says_nothing(here: Here) -> None:
    before = await here.fleet.seen()
    assert not here.telling.is_older(before, "v1")
    await here.telling.announce(here.v1)
    assert here.telling.is_older(before, "v1")
    assert here.telling.is_older(here.fleet.sight, "v1"), "it says first what it has"
    after = await here.fleet.seen()
    assert "v1" in after.manifests and not here.telling.is_older(after, "v1")


async def test_what_was_deleted_here_is_not_there_though_an_older_look_shows_it(here: Here) -> None:
    await here.telling.announce(here.v1)
    shown = await here.fleet.seen()
    assert "v1" in shown.manifests and not here.telling.is_withdrawn(shown, "v1")
    await here.telling.dropped("v1")
    assert here.telling.is_withdrawn(shown, "v1")
    await here.telling.announce(here.v1)
    assert not here.telling.is_withdrawn(await here.fleet.seen(), "v1")


async def test_a_loss_is_not_over_when_an_older_look_lacked_nothing(here: Here) -> None:
    await here.telling.announce(here.v1)
    here.versions.put(replace(here.v1, announced=True))
    whole: Sight = await here.fleet.seen()
    await here.telling.tell(whole, here.told_of)
    assert not here.told and not here.telling.forgotten
    here.directory.forget()
    empty = await here.fleet.seen()
    await here.telling.tell(whole, here.told_of)
    assert here.telling.forgotten, "it was told of what there was before the loss"
    await here.telling.tell(empty, here.told_of)
    assert here.told == ["v1"] and not here.telling.forgotten

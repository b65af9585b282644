"""Who serves, who is on trial, who waits; and nobody is kept waiting by a file."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engine.drafter.counters import Counted, Pair
from engine.drafter.service.ab_test import WINDOW_DRAFTS
from engine.drafter.service.checkpoint_dir import FIRST, Folder
from engine.drafter.service.promotion import Contest
from engine.errors import DrafterRefused
from engine.speculation.counters import Counts


class SlowDisk(Folder):
    """Files come from another disk, for as long as `arriving` is not set."""

    arriving: threading.Event

    def bring(self, source: Path) -> Path:
        self.arriving.wait()
        return super().bring(source)


@dataclass
class Workers:
    """What was loaded, in turn; those in `broken` cannot be."""

    loaded: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    adopted: list[Path] = field(default_factory=list)

    async def load(self, version: str, previous: str, on_trial: bool) -> bool:
        if version in self.broken:
            return False
        self.loaded.append(version)
        return True


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[SlowDisk]:
    def write_first(start: Path) -> None:
        start.mkdir()
        (start / "model.safetensors").write_bytes(b"first")

    folder = SlowDisk(tmp_path / "kept", "name", write_first)
    folder.arriving = threading.Event()
    folder.arriving.set()
    yield folder
    folder.close()


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
def contest(folder: SlowDisk, workers: Workers) -> Contest:
    return Contest(folder, workers.load, workers.adopted.append)


@pytest.fixture
def brought(tmp_path: Path) -> Path:
    file = tmp_path / "brought"
    file.write_bytes(b"brought")
    return file


class Traffic:
    """So many of each drafter's first tokens are accepted, in windows."""

    def __init__(self, **rates: float) -> None:
        self._rates = rates
        self._windows = dict.fromkeys(rates, 0)

    def window(self, serving: str) -> Counted:
        self._windows[serving] += 1
        return Counted(
            serving=serving,
            speculation=Counts().read(),
            pairs=[
                Pair(
                    drafter=name,
                    weights="v0",
                    drafted=drafted,
                    accepted=int(rate * drafted),
                    first_drafted=drafted,
                    first_accepted=int(rate * drafted),
                )
                for name, rate in self._rates.items()
                if (drafted := WINDOW_DRAFTS * self._windows[name])
            ],
        )


async def tried(contest: Contest, workers: Workers, traffic: Traffic) -> None:
    await contest.turn(None)
    while contest.challenger is not None:
        await contest.turn(traffic.window(workers.loaded[-1]))


async def test_one_that_does_better_stays_and_its_file_is_gone_on_from(
    contest: Contest, workers: Workers, folder: Folder, brought: Path
) -> None:
    await contest.offer(brought, "mine")
    await tried(contest, workers, Traffic(mine=0.6, **{FIRST: 0.5}))
    assert (contest.serving, folder.serving, contest.outcomes) == ("mine", "mine", {"promoted": 1})
    assert folder.file("mine").read_bytes() == b"brought"
    assert not folder.file(FIRST).exists()
    assert workers.adopted == [folder.file("mine")]


async def test_one_that_does_worse_leaves_nothing(
    contest: Contest, workers: Workers, folder: Folder, brought: Path
) -> None:
    await contest.offer(brought, "mine")
    await tried(contest, workers, Traffic(mine=0.4, **{FIRST: 0.5}))
    assert (contest.serving, contest.outcomes) == (FIRST, {"rolled_back": 1})
    assert workers.loaded[-1] == FIRST
    assert not folder.file("mine").exists()


async def test_one_that_cannot_be_loaded_is_sent_away(
    contest: Contest, workers: Workers, folder: Folder, brought: Path
) -> None:
    workers.broken.add("mine")
    await contest.offer(brought, "mine")
    await contest.turn(None)
    assert (contest.challenger, contest.outcomes) == (None, {"failed": 1})
    assert not folder.file("mine").exists()


@pytest.mark.parametrize("version", [FIRST, "training", "trained-3", "published-3"])
async def test_names_of_our_own_are_refused(contest: Contest, brought: Path, version: str) -> None:
    with pytest.raises(DrafterRefused, match="name"):
        await contest.offer(brought, version)
    assert brought.exists()


async def test_one_that_was_trained_here_waits_behind_one_that_was_brought(
    contest: Contest, folder: Folder, brought: Path
) -> None:
    def trained(num_steps: int) -> Path:
        file = folder.path / f"published-{num_steps}.safetensors"
        file.write_bytes(b"trained")
        return file

    contest.published(trained(1), 1)
    contest.published(trained(2), 2)
    assert contest.challenger == "trained-2"
    assert not folder.file("trained-1").exists()
    await contest.offer(brought, "mine")
    assert contest.challenger == "mine"
    contest.published(trained(3), 3)
    assert contest.challenger == "mine"
    files = {file.name for file in folder.path.glob("*.safetensors")}
    assert files == {f"{FIRST}.safetensors", "mine.safetensors"}


async def test_while_a_file_comes_from_another_disk_all_else_goes_on(
    contest: Contest, folder: SlowDisk, brought: Path, tmp_path: Path
) -> None:
    """It is moved in a thread: this one would otherwise wait for itself."""
    folder.arriving.clear()
    coming = asyncio.create_task(contest.offer(brought, "mine"))
    await asyncio.sleep(0)
    await contest.turn(None)
    other = tmp_path / "other"
    other.write_bytes(b"other")
    with pytest.raises(DrafterRefused, match="another"):
        await contest.offer(other, "theirs")
    assert contest.challenger is None
    folder.arriving.set()
    await coming
    assert contest.challenger == "mine"
    assert not list(folder.path.glob("*.part"))


async def test_one_whose_file_does_not_come_keeps_nobody_out(
    contest: Contest, folder: Folder, brought: Path, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError):
        await contest.offer(tmp_path / "gone", "mine")
    assert not list(folder.path.glob("*.part"))
    await contest.offer(brought, "mine")
    assert contest.challenger == "mine"

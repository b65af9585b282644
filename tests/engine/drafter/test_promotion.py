"""Promotion of drafters: serving, on trial, waiting. File operations never block the event loop."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engine.drafter.acceptance_by_version import PairSnapshot, Snapshot
from engine.drafter.service.checkpoint_dir import INITIAL_VERSION, DrafterDir
from engine.drafter.service.promotion import WINDOW_DRAFTS, DrafterPromotion
from engine.errors import DrafterRefused


class SlowDisk(DrafterDir):
    """A directory whose files arrive from another disk until `arriving` is set."""

    arriving: threading.Event

    def import_file(self, source: Path) -> Path:
        self.arriving.wait()
        return super().import_file(source)


@dataclass
class Workers:
    """Records loads in order; loads of drafters in `broken` fail."""

    loaded: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    adopted: list[Path] = field(default_factory=list)
    asleep: bool = False

    async def load(self, version: str, previous: str, on_trial: bool) -> bool:
        if self.asleep or version in self.broken:
            return False
        self.loaded.append(version)
        return True


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[SlowDisk]:
    def write_initial(start: Path) -> None:
        start.mkdir()
        (start / "model.safetensors").write_bytes(b"first")

    folder = SlowDisk(tmp_path / "kept", "name", write_initial)
    folder.arriving = threading.Event()
    folder.arriving.set()
    yield folder
    folder.close()


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
def promotion(folder: SlowDisk, workers: Workers) -> DrafterPromotion:
    return DrafterPromotion(folder, workers.load, workers.adopted.append, lambda: workers.asleep)


@pytest.fixture
def imported(tmp_path: Path) -> Path:
    file = tmp_path / "imported"
    file.write_bytes(b"imported")
    return file


class Traffic:
    """Traffic in windows, with a number of accepted first tokens per drafter."""

    def __init__(self, **rates: float) -> None:
        self._rates = rates
        self._windows = dict.fromkeys(rates, 0)

    def window(self, serving: str) -> Snapshot:
        self._windows[serving] += 1
        return Snapshot(
            serving=serving,
            pairs=[
                PairSnapshot(
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


async def tried(promotion: DrafterPromotion, workers: Workers, traffic: Traffic) -> None:
    await promotion.poll(None)
    while promotion.candidate_version is not None:
        await promotion.poll(traffic.window(workers.loaded[-1]))


async def test_better_drafter_is_promoted_and_training_continues_from_it(
    promotion: DrafterPromotion, workers: Workers, folder: DrafterDir, imported: Path
) -> None:
    await promotion.submit(imported, "mine")
    await tried(promotion, workers, Traffic(mine=0.6, **{INITIAL_VERSION: 0.5}))
    assert (promotion.serving, folder.serving, promotion.outcomes) == (
        "mine",
        "mine",
        {"promoted": 1},
    )
    assert folder.file("mine").read_bytes() == b"imported"
    assert not folder.file(INITIAL_VERSION).exists()
    assert workers.adopted == [folder.file("mine")]


async def test_worse_drafter_leaves_nothing(
    promotion: DrafterPromotion, workers: Workers, folder: DrafterDir, imported: Path
) -> None:
    await promotion.submit(imported, "mine")
    await tried(promotion, workers, Traffic(mine=0.4, **{INITIAL_VERSION: 0.5}))
    assert (promotion.serving, promotion.outcomes) == (INITIAL_VERSION, {"rolled_back": 1})
    assert workers.loaded[-1] == INITIAL_VERSION
    assert not folder.file("mine").exists()


async def test_drafter_that_fails_to_load_is_dropped(
    promotion: DrafterPromotion, workers: Workers, folder: DrafterDir, imported: Path
) -> None:
    workers.broken.add("mine")
    await promotion.submit(imported, "mine")
    await promotion.poll(None)
    assert (promotion.candidate_version, promotion.outcomes) == (None, {"failed": 1})
    assert not folder.file("mine").exists()


async def test_drafters_wait_while_the_engine_sleeps(
    promotion: DrafterPromotion, workers: Workers, folder: DrafterDir, imported: Path
) -> None:
    """Workers refuse to load a drafter then; the version must not count as one that failed."""
    await promotion.submit(imported, "mine")
    workers.asleep = True
    await promotion.poll(None)
    workers.asleep = False
    await promotion.poll(None)
    traffic = Traffic(mine=0.6, **{INITIAL_VERSION: 0.5})
    workers.asleep = True
    await promotion.poll(traffic.window("mine"))
    workers.asleep = False
    await tried(promotion, workers, traffic)
    assert (promotion.serving, promotion.outcomes) == ("mine", {"promoted": 1})


@pytest.mark.parametrize("version", [INITIAL_VERSION, "training", "trained-3", "published-3"])
async def test_reserved_names_are_refused(
    promotion: DrafterPromotion, imported: Path, version: str
) -> None:
    with pytest.raises(DrafterRefused, match="name"):
        await promotion.submit(imported, version)
    assert imported.exists()


async def test_trained_drafter_waits_behind_an_imported_one(
    promotion: DrafterPromotion, folder: DrafterDir, imported: Path
) -> None:
    def trained(num_steps: int) -> Path:
        file = folder.path / f"published-{num_steps}.safetensors"
        file.write_bytes(b"trained")
        return file

    promotion.published(trained(1), 1)
    promotion.published(trained(2), 2)
    assert promotion.candidate_version == "trained-2"
    assert not folder.file("trained-1").exists()
    await promotion.submit(imported, "mine")
    assert promotion.candidate_version == "mine"
    promotion.published(trained(3), 3)
    assert promotion.candidate_version == "mine"
    files = {file.name for file in folder.path.glob("*.safetensors")}
    assert files == {f"{INITIAL_VERSION}.safetensors", "mine.safetensors"}


async def test_file_moved_from_another_disk_blocks_nothing_else(
    promotion: DrafterPromotion, folder: SlowDisk, imported: Path, tmp_path: Path
) -> None:
    """It is moved in a thread; this thread would otherwise wait for itself."""
    folder.arriving.clear()
    coming = asyncio.create_task(promotion.submit(imported, "mine"))
    await asyncio.sleep(0)
    await promotion.poll(None)
    other = tmp_path / "other"
    other.write_bytes(b"other")
    with pytest.raises(DrafterRefused, match="another"):
        await promotion.submit(other, "theirs")
    assert promotion.candidate_version is None
    folder.arriving.set()
    await coming
    assert promotion.candidate_version == "mine"
    assert not list(folder.path.glob("*.part"))


async def test_drafter_whose_file_never_arrives_blocks_no_other(
    promotion: DrafterPromotion, folder: DrafterDir, imported: Path, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError):
        await promotion.submit(tmp_path / "gone", "mine")
    assert not list(folder.path.glob("*.part"))
    await promotion.submit(imported, "mine")
    assert promotion.candidate_version == "mine"

"""Updates of weights from machine 0, with a machine 1 that need not see its files."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.errors import LoadFailed
from engine.launch.worker_machines import MachineMethods
from engine.runtime.heartbeat import Heartbeat
from engine.weights.updates import ServedWeights


class TwoMachines:
    """Processes of an engine whose machine 1 has the folder `own` in place of `shared`, if set."""

    def __init__(self, shared: Path) -> None:
        self._shared = shared
        self.own: Path | None = None
        self.loaded: list[str] = []

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self, method.removeprefix("coppice_"))(*args)] * 2

    async def call_cores(self, method: str, *args: Any) -> list[Any]:
        return [{"num_kept_tokens": 0}]

    async def set_version(self, version: str) -> None:
        pass

    def sees_files(self, path: str, files: str) -> bool:
        there = path if self.own is None else path.replace(str(self._shared), str(self.own))
        return MachineMethods().coppice_sees_files(there, files)

    def load_weights(self, path: str, previous: str) -> Any:
        self.loaded.append(Path(path).name)
        return {"ok": True, "seconds": 0.0}


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Folder of machine 0, with the files that the engine starts from."""
    write(tmp_path / "shared" / "model", b"initial")
    return tmp_path / "shared"


@pytest.fixture
def machines(shared: Path) -> TwoMachines:
    return TwoMachines(shared)


def write(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "model.safetensors").write_bytes(content)
    return folder


def served(machines: TwoMachines, shared: Path) -> ServedWeights:
    processes: Any = machines
    checkpoint: Any = None
    return ServedWeights(
        processes,
        Heartbeat(timeouts={}),
        shared / "model",
        checkpoint,
        version="v0",
        is_on_several_machines=True,
    )


async def update(weights: ServedWeights, path: Path) -> None:
    await weights.update(path, path.name, keep_kv=False)


async def test_versions_on_a_shared_file_system_are_loaded(
    machines: TwoMachines, shared: Path
) -> None:
    weights = served(machines, shared)
    for content in (b"v1", b"v2"):
        await update(weights, write(shared / "next", content))
    await update(weights, shared / "model")
    assert machines.loaded == ["next", "next", "model"]


@pytest.mark.parametrize("has_others", [False, True])
async def test_files_that_a_machine_does_not_see_are_refused_before_the_load(
    machines: TwoMachines, shared: Path, tmp_path: Path, has_others: bool
) -> None:
    weights = served(machines, shared)
    machines.own = tmp_path / "own"
    if has_others:
        write(machines.own / "v1", b"not v1")
    message = r"ranks \[0, 1\] do not see the files of v1: .* a file system that all of them share"
    with pytest.raises(LoadFailed, match=message):
        await update(weights, write(shared / "v1", b"v1"))
    assert machines.loaded == []


async def test_files_of_the_start_may_be_elsewhere(
    machines: TwoMachines, shared: Path, tmp_path: Path
) -> None:
    """As copies of the model on each machine, which are compared at the start."""
    weights = served(machines, shared)
    machines.own = tmp_path / "own"
    shutil.copytree(write(shared / "v1", b"v1"), machines.own / "v1")
    await update(weights, shared / "v1")
    await update(weights, shared / "model")
    assert machines.loaded == ["v1", "model"]


async def test_files_of_the_start_that_only_one_machine_has_overwritten_are_refused(
    machines: TwoMachines, shared: Path, tmp_path: Path
) -> None:
    """Neither loaded nor restored: the ranks would have different weights."""
    weights = served(machines, shared)
    machines.own = tmp_path / "own"
    write(machines.own / "model", b"initial")
    write(shared / "model", b"v1")
    shutil.copytree(write(shared / "v2", b"v2"), machines.own / "v2")
    for path in (shared / "model", shared / "v2"):
        with pytest.raises(LoadFailed, match="do not see the files of"):
            await update(weights, path)
    assert machines.loaded == []


def test_only_the_model_of_the_start_may_have_another_path() -> None:
    worker: Any = SimpleNamespace(
        model_config=SimpleNamespace(model="/here/model"), coppice_first_model="/there/model"
    )
    assert MachineMethods.coppice_local_path(worker, "/there/model") == "/here/model"
    assert MachineMethods.coppice_local_path(worker, "/there/v1") == "/there/v1"

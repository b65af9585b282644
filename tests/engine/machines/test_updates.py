"""Updates of weights and adapters from machine 0, with the copies of a machine 1 on loopback."""

import asyncio
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import LoadFailed
from engine.launch.environment import COPIES_ENV
from engine.runtime.heartbeat import Heartbeat
from engine.settings import EngineSettings
from engine.weights.loaded_adapters import LoadedAdapters
from engine.weights.machine_copies import MachineCopies
from engine.weights.updates import ServedWeights
from engine.weights.worker_copies import Copies, CopySource

SETTINGS = EngineSettings(nnodes=2, tensor_parallel_size=2, master_addr="127.0.0.1")


class MachineOne:
    """Processes of an engine, as its service calls them; its worker sees no files of machine 0."""

    def __init__(self) -> None:
        self.copies = Copies()
        self.calls: list[str] = []
        self.loaded: list[bytes] = []
        self.copy_error: str | None = None
        self.load_error: str | None = None
        self.is_stalled = False

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        self.calls.append(method)
        return [getattr(self, method.removeprefix("coppice_"))(*args)]

    async def call_cores(self, method: str, *args: Any) -> list[Any]:
        return [{"num_kept_tokens": 0}]

    async def set_version(self, version: str) -> None:
        pass

    def start_copy(self, source: CopySource) -> Any:
        files = [file.copy() for file in source["files"]]
        for file in files:
            file["mtime_ns"] += 1
        url = "http://127.0.0.1:1/token/" if self.copy_error else source["url"]
        hidden = CopySource(
            path=source["path"], url=url, is_initial=source["is_initial"], files=files
        )
        self.copies.start(hidden, local_rank=0)
        return self.copy_state(source["path"])

    def copy_state(self, path: str) -> Any:
        return {"is_ready": False, "error": None} if self.is_stalled else self.copies.state(path)

    def keep_copy(self, path: str) -> None:
        self.copies.keep(path)

    def discard_copy(self, path: str) -> None:
        self.copies.discard(path)

    def drop_copy(self, path: str) -> None:
        self.copies.drop(path)

    def load_weights(self, path: str, previous: str) -> Any:
        """Result of the load; both checkpoints are read first, as by the worker."""
        content, restored = (
            (Path(self.copies.local_path(read)) / "model.safetensors").read_bytes()
            for read in (path, previous)
        )
        self.loaded.append(restored if self.load_error else content)
        failed = {"ok": False, "error": self.load_error, "restored": True, "has_reloaded": True}
        return failed if self.load_error else {"ok": True, "seconds": 0.0}

    def load_adapter(self, name: str, number: int, path: str) -> Any:
        self.loaded.append((Path(self.copies.local_path(path)) / "adapter.json").read_bytes())

    def unload_adapter(self, number: int) -> None:
        pass


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MachineOne]:
    monkeypatch.setenv(COPIES_ENV, str(tmp_path / "copies" / "engine-0"))
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    machine = MachineOne()
    yield machine
    machine.copies.close()


@pytest.fixture
def model(tmp_path: Path, machine: MachineOne) -> Path:
    """The files that the engine starts from; machine 1 has them at another path."""
    own = write(tmp_path / "own", b"initial")
    path = write(tmp_path / "model", b"initial")
    machine.copies.set_local_path(str(path), str(own))
    return path


def write(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    return folder


def served(machine: MachineOne, model: Path) -> ServedWeights:
    processes: Any = machine
    checkpoint: Any = None
    return ServedWeights(
        processes,
        Heartbeat(timeouts={}),
        model,
        checkpoint,
        MachineCopies(processes, SETTINGS),
        version="v0",
    )


def num_copies(folder: Path) -> int:
    for thread in threading.enumerate():
        if thread.name == "removal":
            thread.join()
    return len(list((folder / "copies").glob("engine-*/*/**/*.safetensors")))


async def update(weights: ServedWeights, path: Path) -> None:
    await weights.prepare(path)
    await weights.update(path, path.name, keep_kv=False)


async def test_one_copy_is_left_of_a_directory_that_is_overwritten(
    machine: MachineOne, model: Path, tmp_path: Path
) -> None:
    weights = served(machine, model)
    for content in (b"v1", b"v2", b"v3"):
        await update(weights, write(tmp_path / "next", content))
        assert num_copies(tmp_path) == 1
    await update(weights, model)
    assert num_copies(tmp_path) == 0
    assert machine.loaded == [b"v1", b"v2", b"v3", b"initial"]


async def test_overwritten_files_of_the_start_are_copied(
    machine: MachineOne, model: Path, tmp_path: Path
) -> None:
    weights = served(machine, model)
    await update(weights, write(model, b"v1"))
    assert machine.loaded == [b"v1"]
    assert num_copies(tmp_path) == 1


@pytest.mark.parametrize("failure", ["copy_error", "load_error"])
async def test_failure_at_the_served_path_does_not_prevent_the_next_update(
    machine: MachineOne, model: Path, tmp_path: Path, failure: str
) -> None:
    weights, path = served(machine, model), tmp_path / "next"
    await update(weights, write(path, b"v1"))
    setattr(machine, failure, "disk full")
    with pytest.raises(LoadFailed):
        await update(weights, write(path, b"v2"))
    assert num_copies(tmp_path) == 1
    setattr(machine, failure, None)
    await update(weights, write(tmp_path / "other", b"v3"))
    assert machine.loaded[0] == b"v1"
    assert machine.loaded[-1] == b"v3"
    assert num_copies(tmp_path) == 1


async def test_all_machines_restore_the_files_that_machine_0_has(
    machine: MachineOne, model: Path, tmp_path: Path
) -> None:
    weights, path = served(machine, model), tmp_path / "next"
    await update(weights, write(path, b"v1"))
    write(path, b"overwritten, not published")
    machine.load_error = "no memory"
    with pytest.raises(LoadFailed):
        await update(weights, write(tmp_path / "other", b"v2"))
    assert machine.loaded == [b"v1", b"overwritten, not published"]
    assert num_copies(tmp_path) == 1


async def test_prepared_files_are_not_copied_again_during_the_pause(
    machine: MachineOne, model: Path, tmp_path: Path
) -> None:
    weights, path = served(machine, model), write(tmp_path / "next", b"v1")
    await weights.prepare(path)
    machine.calls.clear()
    await weights.update(path, "v1", keep_kv=False)
    assert machine.calls == ["coppice_load_weights", "coppice_keep_copy", "coppice_drop_copy"]


async def test_files_that_change_after_the_copy_are_copied_again(
    machine: MachineOne, model: Path, tmp_path: Path
) -> None:
    weights, path = served(machine, model), write(tmp_path / "next", b"v1")
    await weights.prepare(path)
    write(path, b"changed")
    await weights.update(path, "v1", keep_kv=False)
    assert machine.loaded == [b"changed"]


async def test_files_that_are_not_loaded_are_removed(
    machine: MachineOne, model: Path, tmp_path: Path
) -> None:
    weights = served(machine, model)
    await weights.prepare(write(tmp_path / "unused", b"v1"))
    await update(weights, write(tmp_path / "next", b"v2"))
    assert num_copies(tmp_path) == 1


def of_the_file_server() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "weights-files"]


async def test_copy_has_a_time_limit(machine: MachineOne, model: Path, tmp_path: Path) -> None:
    machine.is_stalled = True
    processes: Any = machine
    times = itertools.count(0.0, SETTINGS.activation_seconds)
    copies = MachineCopies(processes, SETTINGS, clock=lambda: next(times))
    with pytest.raises(LoadFailed, match=r"within 600 s \(engine.activation_seconds\)"):
        await copies.create(write(tmp_path / "next", b"v1"))
    assert num_copies(tmp_path) == 0
    assert not of_the_file_server()


async def test_cancelled_copy_closes_the_file_server(
    machine: MachineOne, model: Path, tmp_path: Path
) -> None:
    machine.is_stalled = True
    processes: Any = machine
    path = write(tmp_path / "next", b"v1")
    for num_steps in range(12):
        creation = asyncio.create_task(MachineCopies(processes, SETTINGS).create(path))
        for _ in range(num_steps):
            await asyncio.sleep(0.001)
        creation.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creation
        assert not of_the_file_server()


async def test_adapter_is_kept_while_another_one_has_its_path(
    machine: MachineOne, tmp_path: Path
) -> None:
    processes: Any = machine
    adapters = LoadedAdapters(2, MachineCopies(processes, SETTINGS))
    path = tmp_path / "adapter"
    path.mkdir()
    for label in ("a@1", "a@2"):
        (path / "adapter.json").write_text(label)
        await adapters.load(processes, label, path)
    await adapters.unload(processes, "a@1")
    assert machine.copies.local_path(str(path)) != str(path), "machine 1 has its copy still"
    assert await adapters.reload(processes)
    assert machine.loaded == [b"a@1", b"a@2", b"a@2"]
    await adapters.unload(processes, "a@2")
    assert machine.copies.local_path(str(path)) == str(path)

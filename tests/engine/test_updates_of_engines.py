"""Loads of weights and adapters on several engines: on all or on none."""

from pathlib import Path
from typing import Any

import pytest

from engine.errors import EngineDead, LoadFailed
from engine.runtime.heartbeat import Heartbeat
from engine.settings import EngineSettings
from engine.weights.checkpoint import read_base_checkpoint
from engine.weights.loaded_adapters import LoadedAdapters
from engine.weights.machine_copies import MachineCopies
from engine.weights.updates import ServedWeights
from tests.engine.seedling import MODEL

LOADED = {"ok": True, "seconds": 0.1}
RESTORED = {"ok": False, "error": "the disk is gone", "restored": True}
BROKEN = {"ok": False, "error": "the disk is gone", "restored": False}
NEW = Path("new")


class Processes:
    """Two engines whose workers return the next of the given results."""

    def __init__(self, *results: list[Any]) -> None:
        self._results = list(results)
        self.calls: list[tuple[Any, ...]] = []
        self.version = "v0"

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        self.calls.append((method, *args))
        return self._results.pop(0)

    async def call_cores(self, method: str, *args: Any) -> list[Any]:
        self.calls.append((method, *args))
        return [{"num_kept_tokens": 3}, {"num_kept_tokens": 4}]

    async def set_version(self, version: str) -> None:
        self.version = version


def served(processes: Any) -> tuple[ServedWeights, Heartbeat]:
    heartbeat = Heartbeat(timeouts={})
    copies = MachineCopies(processes, EngineSettings())
    weights = ServedWeights(processes, heartbeat, MODEL, read_base_checkpoint(MODEL), copies)
    return weights, heartbeat


def load(path: Path) -> tuple[str, str, str]:
    return ("coppice_load_weights", str(path), str(MODEL))


async def test_kept_tokens_of_all_engines_are_counted() -> None:
    processes = Processes([LOADED, LOADED])
    weights, _ = served(processes)
    assert await weights.update(NEW, "v1", keep_kv=True) == 7
    assert processes.version == "v1"


async def test_files_are_read_once_without_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def fingerprint(path: Path) -> tuple[()]:
        read.append(path)
        return ()

    weights, _ = served(Processes([LOADED, LOADED]))
    monkeypatch.setattr("engine.weights.updates._fingerprint", fingerprint)
    await weights.update(NEW, "v1", keep_kv=False)
    assert read == [NEW]


@pytest.mark.parametrize("results", [[LOADED, RESTORED], [RESTORED, LOADED]])
async def test_engines_that_have_loaded_restore_the_previous_weights(results: list[Any]) -> None:
    processes = Processes(results, [LOADED, LOADED])
    weights, heartbeat = served(processes)
    with pytest.raises(LoadFailed):
        await weights.update(NEW, "v1", keep_kv=False)
    assert processes.calls == [load(NEW), load(MODEL)]
    assert (processes.version, heartbeat.stage) == ("v0", "serving")


async def test_nothing_is_loaded_again_if_all_engines_have_failed() -> None:
    processes = Processes([RESTORED, RESTORED])
    weights, heartbeat = served(processes)
    with pytest.raises(LoadFailed):
        await weights.update(NEW, "v1", keep_kv=False)
    assert processes.calls == [load(NEW)]
    assert heartbeat.stage == "serving"


async def test_engine_that_has_neither_weights_is_dead() -> None:
    processes = Processes([BROKEN, RESTORED])
    weights, heartbeat = served(processes)
    with pytest.raises(EngineDead):
        await weights.update(NEW, "v1", keep_kv=False)
    assert heartbeat.stage == "dead"
    assert processes.calls == [load(NEW)]


@pytest.mark.parametrize("is_changed", [False, True])
async def test_kv_is_reset_if_other_files_were_restored(tmp_path: Path, is_changed: bool) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"one")
    processes: Any = Processes([RESTORED, RESTORED])
    copies = MachineCopies(processes, EngineSettings())
    checkpoint = read_base_checkpoint(MODEL)
    weights = ServedWeights(processes, Heartbeat(timeouts={}), tmp_path, checkpoint, copies)
    if is_changed:
        (tmp_path / "model.safetensors").write_bytes(b"other")
    with pytest.raises(LoadFailed):
        await weights.update(NEW, "v1", keep_kv=True)
    resets = [call for call in processes.calls if call[0] == "coppice_reset_prefix_cache"]
    assert len(resets) == is_changed


@pytest.mark.parametrize("restoring", [RESTORED, BROKEN])
async def test_engine_that_keeps_the_new_weights_is_dead(restoring: Any) -> None:
    """It restores the weights that it had before the call, which are the new ones."""
    processes = Processes([LOADED, RESTORED], [restoring, LOADED])
    weights, heartbeat = served(processes)
    with pytest.raises(EngineDead):
        await weights.update(NEW, "v1", keep_kv=False)
    assert heartbeat.stage == "dead"


async def test_adapter_that_one_engine_refuses_is_unloaded_on_the_others() -> None:
    processes: Any = Processes([None, "no slot"], [True, False])
    with pytest.raises(LoadFailed):
        await LoadedAdapters(1, MachineCopies(processes, EngineSettings())).load(
            processes, "a", NEW
        )
    assert [method for method, *_ in processes.calls] == [
        "coppice_load_adapter",
        "coppice_unload_adapter",
    ]

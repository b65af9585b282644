"""Loads of weights and adapters on several engines: on all or on none."""

from pathlib import Path
from typing import Any

import pytest

from engine.adapters.loaded_adapters import LoadedAdapters
from engine.errors import CheckpointRefused, EngineDead, FilesRestored, LoadFailed
from engine.runtime.heartbeat import Heartbeat
from engine.weights.checkpoint import read_base_checkpoint
from engine.weights.updates import ServedWeights
from tests.engine.seedling import MODEL

LOADED = {"ok": True, "seconds": 0.1}
RESTORED = {"ok": False, "error": "the disk is gone", "restored": True, "has_reloaded": True}
KEPT = RESTORED | {"error": "no handle for this GPU", "has_reloaded": False}
BROKEN = {"ok": False, "error": "the disk is gone", "restored": False, "has_reloaded": False}
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
    base = read_base_checkpoint(MODEL)
    weights = ServedWeights(processes, heartbeat, MODEL, base, version="v0")
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

    def fingerprint(path: Path) -> str:
        read.append(path)
        return ""

    weights, _ = served(Processes([LOADED, LOADED]))
    monkeypatch.setattr("engine.weights.updates.fingerprint", fingerprint)
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
    checkpoint = read_base_checkpoint(MODEL)
    weights = ServedWeights(processes, Heartbeat(timeouts={}), tmp_path, checkpoint, version="v0")
    if is_changed:
        (tmp_path / "model.safetensors").write_bytes(b"other")
    with pytest.raises(LoadFailed):
        await weights.update(NEW, "v1", keep_kv=True)
    resets = [call for call in processes.calls if call[0] == "coppice_reset_prefix_cache"]
    assert len(resets) == is_changed


TRANSFER: tuple[Any, ...] = ("coppice_load_transfer", str(MODEL))
RESET = ("coppice_reset_prefix_cache",)


async def test_transferred_weights_are_stamped_on_all_engines() -> None:
    processes = Processes([LOADED, LOADED])
    weights, heartbeat = served(processes)
    assert await weights.transfer("gpu-1", keep_kv=True) == 7
    assert processes.calls == [TRANSFER, (*RESET, True)]
    assert (processes.version, heartbeat.stage) == ("gpu-1", "serving")


async def test_refused_transfer_keeps_weights_without_files_and_their_kv() -> None:
    processes = Processes([LOADED, LOADED], [KEPT, KEPT])
    weights, heartbeat = served(processes)
    await weights.transfer("gpu-1")
    with pytest.raises(LoadFailed, match="still served: no handle for this GPU") as raised:
        await weights.transfer("gpu-2")
    assert not isinstance(raised.value, FilesRestored)
    assert processes.calls == [TRANSFER, (*RESET, False), TRANSFER]
    assert (processes.version, heartbeat.stage) == ("gpu-1", "serving")


async def test_failed_transfer_restores_the_previous_files() -> None:
    processes = Processes([LOADED, RESTORED], [LOADED, LOADED])
    weights, _ = served(processes)
    with pytest.raises(LoadFailed) as raised:
        await weights.transfer("gpu-1")
    assert not isinstance(raised.value, FilesRestored)
    assert processes.calls == [TRANSFER, load(MODEL)]
    assert processes.version == "v0"


@pytest.mark.parametrize("is_transfer", [False, True])
@pytest.mark.parametrize(
    ("results", "reloads"),
    [
        ([RESTORED, RESTORED], 0),
        ([RESTORED, LOADED], 1),
        ([KEPT, LOADED], 1),
        ([RESTORED, KEPT], 1),
    ],
)
async def test_all_engines_serve_the_last_files_if_weights_without_files_are_lost(
    results: list[Any], reloads: int, is_transfer: bool
) -> None:
    processes = Processes([LOADED, LOADED], results, *[[LOADED, LOADED]] * (reloads + 1))
    weights, heartbeat = served(processes)
    await weights.transfer("gpu-1")
    processes.calls.clear()
    with pytest.raises(FilesRestored) as raised:
        if is_transfer:
            await weights.transfer("gpu-2")
        else:
            await weights.update(NEW, "v1", keep_kv=True)
    failed = TRANSFER if is_transfer else load(NEW)
    assert processes.calls == [failed, *[load(MODEL)] * reloads, (*RESET, False)]
    assert raised.value.version == processes.version == "v0"
    assert heartbeat.stage == "serving"
    weights.drop()
    assert await weights.reload_dropped() is None, "the files are served"


async def test_last_files_are_restored_only_if_they_are_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"one")
    processes: Any = Processes([LOADED, LOADED], [RESTORED, RESTORED])
    heartbeat, base = Heartbeat(timeouts={}), read_base_checkpoint(MODEL)
    weights = ServedWeights(processes, heartbeat, tmp_path, base, version="v0")
    await weights.transfer("gpu-1")
    file.write_bytes(b"other")
    with pytest.raises(LoadFailed, match="the files of v0, to be loaded if .*, have changed"):
        await weights.open_transfer([])
    assert heartbeat.stage == "serving"
    with pytest.raises(EngineDead):
        await weights.update(NEW, "v1", keep_kv=False)


async def test_dropped_weights_without_files_are_replaced_by_the_last_files() -> None:
    processes = Processes([LOADED, LOADED], [LOADED, LOADED])
    weights, _ = served(processes)
    await weights.transfer("gpu-1")
    processes.calls.clear()
    await weights.check_reload()
    assert not processes.calls, "the served weights stay until they are dropped"
    weights.drop()
    assert await weights.reload_dropped() == processes.version == "v0"
    assert processes.calls == [load(MODEL)]


async def test_dropped_weights_with_files_are_loaded_again() -> None:
    processes = Processes([LOADED, LOADED])
    weights, _ = served(processes)
    assert await weights.reload_dropped() is None
    assert not processes.calls, "they are in memory"
    weights.drop()
    assert await weights.reload_dropped() is None
    assert (processes.calls, processes.version) == ([load(MODEL)], "v0")


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
        await LoadedAdapters(1).load(processes, "a", NEW)
    assert [method for method, *_ in processes.calls] == [
        "coppice_load_adapter",
        "coppice_unload_adapter",
    ]


async def test_tensors_that_an_engine_could_not_open_are_closed_on_all() -> None:
    reason = "CheckpointRefused: norm contains NaN or infinity"
    processes = Processes([None, None, "failed on ranks [1]", reason], [None] * 4)
    weights, _ = served(processes)
    with pytest.raises(CheckpointRefused, match=r"^norm contains NaN or infinity$"):
        await weights.open_transfer([])
    await weights.close_transfer()
    assert processes.calls == [("coppice_open_transfer", []), ("coppice_close_transfer",)]


async def test_open_tensors_are_closed_unless_they_are_loaded() -> None:
    processes = Processes([None, None], [LOADED, LOADED], [None, None], [None, None])
    weights, _ = served(processes)
    await weights.open_transfer([])
    await weights.transfer("gpu-1")
    await weights.close_transfer()
    await weights.open_transfer([])
    await weights.close_transfer()
    assert [call[0] for call in processes.calls] == [
        *("coppice_open_transfer", "coppice_load_transfer", "coppice_reset_prefix_cache"),
        *("coppice_open_transfer", "coppice_close_transfer"),
    ]

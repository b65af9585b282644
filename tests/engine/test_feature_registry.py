"""Registry of the engine's features: what they add to vLLM's processes, and the order of hooks."""

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import engine
from engine.drafter.feature import DraftModel
from engine.errors import EngineDead, LoadFailed
from engine.feature_base import StartSettings
from engine.features import FEATURES, Features, core_methods, worker_methods
from engine.launch.worker_extension import WorkerExtension
from engine.protocol.optional_features import DRAFT_MODEL
from engine.runtime.engine_protocols import SleepListener
from engine.runtime.heartbeat import Heartbeat
from engine.settings import EngineSettings
from engine.speculation.settings import SpeculationSettings
from engine.types.samples import KV_CACHE, WEIGHTS, SleepTag
from engine.weights.checkpoint import read_base_checkpoint
from engine.weights.sleep_mode import SleepMode
from engine.weights.updates import ServedWeights
from tests.engine.seedling import MODEL

FOLDER = Path(engine.__file__ or "").parent
CALLERS = ("features.py", "parts/generation.py", "parts/weights.py")
"""The list, and the calls of the service that are about one feature."""
ALL: frozenset[SleepTag] = frozenset((WEIGHTS, KV_CACHE))


def test_features_are_named_only_in_the_list_and_where_the_service_calls_them() -> None:
    importers = {
        str(file.relative_to(FOLDER))
        for file in FOLDER.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith(".feature")
    }
    assert importers == set(CALLERS)


def test_names_of_features_and_of_their_methods_differ() -> None:
    names = [feature.name for feature in FEATURES]
    methods = [method.__name__ for method in (*core_methods(), *worker_methods())]
    for given in (names, methods):
        assert len(set(given)) == len(given)
    assert all(method.startswith("coppice_") for method in methods)


def test_worker_extension_has_the_methods_of_features() -> None:
    for method in worker_methods():
        assert getattr(WorkerExtension, method.__name__) is method


def test_feature_that_the_service_controls_is_found_by_its_key() -> None:
    assert DraftModel.name == DRAFT_MODEL.name
    features = Features(StartSettings(engine=EngineSettings()))
    assert features.interface(DRAFT_MODEL.name) is None


def test_drafts_of_a_model_are_measured_before_their_gain_is_predicted() -> None:
    names = [feature.name for feature in FEATURES]
    assert names.index("drafter") < names.index("speculation")


def test_settings_that_cannot_be_used_are_replaced() -> None:
    settings = StartSettings(
        engine=EngineSettings(pipeline_parallel_size=2),
        speculation=SpeculationSettings(mode="siblings"),
    )
    Features(settings).check()
    assert settings.of(SpeculationSettings).mode == "off"


class Processes:
    """An engine whose workers sleep, wake and load without a failure."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        self.calls.append(method)
        return [{"ok": True, "seconds": 0.1}] if method == "coppice_load_weights" else [None]

    async def call_cores(self, method: str, *args: Any) -> list[Any]:
        return [{"num_kept_tokens": 0}]

    async def set_version(self, version: str) -> None:
        self.calls.append(version)


class Listener(SleepListener):
    def __init__(self, calls: list[str], error: LoadFailed | None = None) -> None:
        self.calls = calls
        self.error = error

    def on_sleep(self, *, drops_weights: bool) -> None:
        self.calls.append(f"on_sleep {drops_weights}")

    async def on_wake(self) -> None:
        self.calls.append("on_wake")
        if self.error is not None:
            raise self.error


def sleeping(
    processes: Processes, error: LoadFailed | None = None
) -> tuple[SleepMode, ServedWeights, Heartbeat]:
    heartbeat = Heartbeat(timeouts={})
    weights = ServedWeights(processes, heartbeat, MODEL, read_base_checkpoint(MODEL), version="v0")
    listener = Listener(processes.calls, error)
    return SleepMode(processes, heartbeat, weights, listener), weights, heartbeat


@pytest.mark.parametrize(("level", "loads"), [(1, []), (2, ["coppice_load_weights"])])
async def test_features_sleep_first_and_wake_once_all_weights_are_in_memory(
    level: Any, loads: Sequence[str]
) -> None:
    processes = Processes()
    mode, _, heartbeat = sleeping(processes)
    await mode.sleep(level, ALL)
    stages = [heartbeat.stage]
    await mode.wake(frozenset((WEIGHTS,)))
    assert "on_wake" not in processes.calls
    stages.append(heartbeat.stage)
    await mode.wake(ALL)
    assert [*stages, heartbeat.stage] == ["sleeping", "sleeping", "serving"]
    assert processes.calls == [
        *(*loads, f"on_sleep {level == 2}", "coppice_sleep"),
        *("coppice_missing_bytes", "coppice_wake") * 2,
        *(*loads, "on_wake"),
    ]


async def test_weights_that_were_loaded_during_a_sleep_are_not_loaded_again() -> None:
    processes = Processes()
    mode, weights, heartbeat = sleeping(processes)
    await mode.sleep(2, ALL)
    await mode.wake(frozenset((WEIGHTS,)))
    await weights.update(MODEL, "v1", keep_kv=False)
    assert heartbeat.stage == "sleeping"
    processes.calls.clear()
    assert await mode.wake(ALL) is None
    assert processes.calls == ["coppice_missing_bytes", "coppice_wake", "on_wake"]


async def test_feature_that_cannot_wake_ends_the_engine() -> None:
    mode, _, heartbeat = sleeping(Processes(), LoadFailed("an adapter cannot be loaded again"))
    await mode.sleep(1, ALL)
    with pytest.raises(EngineDead, match="an adapter cannot be loaded again"):
        await mode.wake(ALL)
    assert heartbeat.health().reason == "an adapter cannot be loaded again"

"""States of an activation, as the engine sees them when it is called."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.errors import EngineDead, LoadFailed
from engine.types.samples import PauseMode
from engine.weights.ipc_tensors import IpcTensor
from service.errors import EngineGone
from service.weights.activation import NEXT_STATES, ActivationState
from tests.fake_engine import FakeEngine
from tests.service.test_weight_transfers import IPC, transfer
from tests.service.test_weights import activate, upload
from tests.serving import Served, serving


class Watching(FakeEngine):
    """Records the state of the activation at each call."""

    served: Served | None = None

    def __init__(self) -> None:
        super().__init__()
        self.states: list[str] = []

    def record(self) -> None:
        if self.served is not None:
            self.states.append(self.served.server.activation.state)

    async def pause(self, mode: PauseMode, *, recompute: bool = False) -> None:
        self.record()
        await super().pause(mode, recompute=recompute)

    async def resume(self) -> None:
        self.record()
        await super().resume()

    async def open_transfer(self, tensors: Sequence[IpcTensor]) -> None:
        self.record()
        await super().open_transfer(tensors)

    def _swap(self, version: str, *, keep_kv: bool) -> int:
        self.record()
        return super()._swap(version, keep_kv=keep_kv)


def test_every_state_but_failed_leads_on() -> None:
    assert NEXT_STATES.keys() == set(ActivationState)
    assert [state for state in ActivationState if not NEXT_STATES[state]] == ["failed"]
    assert set().union(*NEXT_STATES.values()) == set(ActivationState)


@pytest.mark.parametrize("error", [None, LoadFailed("no")])
@pytest.mark.parametrize("mode", ["keep", "abort", "recompute", "wait"])
async def test_engine_is_paused_loads_and_resumes(
    tmp_path: Path, mode: str, error: LoadFailed | None
) -> None:
    engine = Watching()
    async with serving(engine, tmp_path) as served:
        await upload(served, "v1")
        engine.served, engine.load_error = served, error
        assert (await activate(served, "v1", mode=mode)).status_code == (500 if error else 200)
        assert engine.states == ["pausing", "loading", "resuming"]
        assert served.server.activation.state == "idle"


async def test_tensors_in_gpu_memory_are_staged_before_the_pause(tmp_path: Path) -> None:
    engine = Watching()
    async with serving(engine, tmp_path, **IPC) as served:
        engine.served = served
        assert (await transfer(served, "v1")).status_code == 200
        assert engine.states == ["staging", "pausing", "loading", "resuming"]
        engine.open_error = LoadFailed("changed")
        engine.states.clear()
        assert (await transfer(served, "v2")).json()["code"] == "activation_failed"
        assert (engine.states, served.server.activation.state) == (["staging"], "idle")


async def test_activation_after_the_death_of_the_engine_does_not_call_it(tmp_path: Path) -> None:
    engine = Watching()
    async with serving(engine, tmp_path) as served:
        await upload(served, "v1")
        engine.served, engine.load_error = served, EngineDead("half loaded")
        assert (await activate(served, "v1")).json()["code"] == "engine_dead"
        assert engine.states == ["pausing", "loading"]
        with pytest.raises(EngineGone):
            await served.server.activation.apply("v1", "keep", allow_rollback=False)
        assert engine.states == ["pausing", "loading"] and engine.paused
        assert served.server.activation.state == "failed"

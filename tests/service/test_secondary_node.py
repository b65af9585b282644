"""`coppice serve` on a machine other than the first, with a fake for its ranks."""

import asyncio
import os
import signal
import socket
from pathlib import Path

import httpx
import pytest

from engine.errors import EngineDead, StartFailed
from engine.types.info import EngineHealth, EngineStage, StartPhase
from service.config.settings import Settings
from service.http.serve import open_listener
from service.secondary_node import create_node_app, run_node

REASON = "machine 0 has ended"


class FakeNode:
    """Ranks that serve until `end` seconds have passed; forever if it is None."""

    def __init__(self, end: float | None = None, error: StartFailed | None = None) -> None:
        self.stage: EngineStage = "starting"
        self.is_stopped = False
        self._end, self._error = end, error

    def health(self) -> EngineHealth:
        alive = self.stage != "dead"
        reason = None if alive else REASON
        phase = StartPhase(name="compiling", seconds=45.2) if self.stage == "starting" else None
        return EngineHealth(
            stage=self.stage, alive=alive, age_seconds=0.0, reason=reason, start_phase=phase
        )

    async def run(self) -> str:
        if self._error is not None:
            raise self._error
        if self._end is None:
            await asyncio.Event().wait()
        await asyncio.sleep(self._end or 0)
        return REASON

    async def stop(self) -> None:
        self.is_stopped = True


async def statuses(node: FakeNode) -> dict[str, int]:
    transport = httpx.ASGITransport(create_node_app(node))
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as http:
        paths = ("/startupz", "/livez", "/readyz", "/v1/rollouts")
        return {path: (await http.get(path)).status_code for path in paths}


async def test_probe_shows_the_phase_of_the_start_of_ranks() -> None:
    transport = httpx.ASGITransport(create_node_app(FakeNode()))
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as http:
        assert (await http.get("/readyz")).json()[
            "detail"
        ] == "the model is loading: compiling, 45 s"


async def test_probes_show_the_state_of_the_ranks() -> None:
    node = FakeNode()
    other = {"/v1/rollouts": 404}
    assert await statuses(node) == other | {"/startupz": 503, "/readyz": 503, "/livez": 200}
    node.stage = "serving"
    assert await statuses(node) == other | {"/startupz": 200, "/readyz": 200, "/livez": 200}
    node.stage = "dead"
    assert await statuses(node) == other | {"/startupz": 503, "/readyz": 503, "/livez": 503}


def listener() -> socket.socket:
    return open_listener("127.0.0.1", 0)


def test_end_of_the_engine_ends_the_process_with_the_reason() -> None:
    node = FakeNode(end=0.01)
    with listener() as opened, pytest.raises(EngineDead, match=REASON):
        run_node(node, Settings(), opened)
    assert node.is_stopped


def test_failed_start_ends_the_process_with_the_reason(tmp_path: Path) -> None:
    node = FakeNode(error=StartFailed("no such model"))
    with listener() as opened, pytest.raises(StartFailed, match="no such model"):
        run_node(node, Settings(), opened)
    assert node.is_stopped


@pytest.mark.parametrize(
    ("signals", "drain_seconds", "end"), [(1, 60, 0.05), (1, 0, None), (2, 60, None)]
)
def test_signal_ends_the_process_after_machine_0(
    signals: int, drain_seconds: int, end: float | None
) -> None:
    """Machine 0 ends meanwhile, or the drain takes too long, or a second signal arrives."""

    class Signalled(FakeNode):
        async def run(self) -> str:
            for _ in range(signals):
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0.05)
            return await super().run()

    node = Signalled(end)
    settings = Settings.model_validate(
        {"server": {"drain_seconds": drain_seconds, "stop_seconds": 0.1}}
    )
    with listener() as opened:
        run_node(node, settings, opened)
    assert node.is_stopped


def test_wait_for_machine_0_lasts_as_long_as_its_stop_may_take(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Signalled(FakeNode):
        async def run(self) -> str:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)
            return REASON

    settings = Settings.model_validate({"server": {"drain_seconds": 60, "stop_seconds": 40}})
    with listener() as opened, caplog.at_level("INFO", "service.secondary_node"):
        run_node(Signalled(), settings, opened)
    assert "waiting for the end of machine 0, for up to 100 s" in caplog.text

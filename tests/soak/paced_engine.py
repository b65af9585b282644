"""A whole server in its own process over a fake engine with realistic delays.

Run by `python -m tests.soak.paced_engine serve ...`.
"""

import asyncio
from pathlib import Path

from service.cli import run
from service.serve_components import ServeComponents
from tests.fake_engine import FakeEngine

STEP_SECONDS = 0.005
LOAD_SECONDS = 0.3


class PacedEngine(FakeEngine):
    """Samples one token for every running sample every few milliseconds; loads weights slowly."""

    def __init__(self) -> None:
        super().__init__(instant=False, prompt_kv=True)
        self._pacing: asyncio.Task[None] | None = None

    async def start(self, version: str) -> None:
        await super().start(version)
        self._pacing = asyncio.create_task(self._pace())
        self._pacing.add_done_callback(self._on_paced)

    async def update_weights(self, path: Path, version: str, *, keep_kv: bool = False) -> int:
        self._stage = "activating"
        await asyncio.sleep(LOAD_SECONDS)
        self._stage = "serving"
        return await super().update_weights(path, version, keep_kv=keep_kv)

    async def stop(self) -> None:
        if self._pacing is not None:
            self._pacing.cancel()
        await super().stop()

    async def _pace(self) -> None:
        while True:
            self.step()
            await asyncio.sleep(STEP_SECONDS)

    def _on_paced(self, pacing: asyncio.Task[None]) -> None:
        """End the engine if a step has failed, as EngineCore does."""
        if not pacing.cancelled():
            self.kill()


if __name__ == "__main__":
    run(components=ServeComponents(load_engine=lambda settings: PacedEngine()))

"""A drafter behind a real server: trained on its traffic, replaced, downloaded and uploaded."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from coppice import AsyncRollouts
from coppice.errors import WeightsRefused
from coppice.wire.weights import DrafterAnswer
from engine.attention.settings import AttentionSettings
from engine.drafter.service.initial_model import write_random_model
from engine.speculation.settings import SpeculationSettings
from engine.vllm_engine import VllmEngine
from tests.engine.random_models import random_tensors, write_model
from tests.engine.seedling import settings
from tests.serving import Served, serving

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive, pytest.mark.long]

PROMPTS = ["Compute 12+34.\n", "Compute 7*8+9.\n", "Compute 15+27+33.\n", "Compute 4*19-7.\n"]
# The trainer has the lowest priority: next to other tests it gets only idle time.
TIMEOUT_SECONDS = 900


@asynccontextmanager
async def drafted(tmp_path: Path) -> AsyncIterator[tuple[Served, AsyncRollouts]]:
    """A server with an untrained drafter, under continuous traffic."""
    speculation = SpeculationSettings(
        mode="drafter",
        longest_draft=3,
    )
    engine = VllmEngine(
        settings(
            cpu_threads=1,
            max_sequences=32,
            max_context_tokens=512,
            cache_directory=tmp_path / "cache",
        ),
        attention=AttentionSettings(shared_prefix="off"),
        speculation=speculation,
    )
    async with (
        serving(engine, tmp_path) as served,
        AsyncRollouts(served.url, timeout=300) as rollouts,
    ):
        traffic = asyncio.create_task(_traffic(rollouts))
        yield served, rollouts
        traffic.cancel()
        await asyncio.gather(traffic, return_exceptions=True)


async def _traffic(rollouts: AsyncRollouts) -> None:
    while True:
        await rollouts.rollout(PROMPTS, n=4, max_tokens=60)


async def until(rollouts: AsyncRollouts, reached: Callable[[DrafterAnswer], bool]) -> DrafterAnswer:
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while not reached(answer := await rollouts.drafter()):
            await asyncio.sleep(0.25)
    return answer


def trainers() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "engine.drafter.trainer" in child.cmdline()]


async def test_drafter_learns_from_traffic_and_a_worse_one_is_dropped(
    tmp_path: Path,
) -> None:
    async with drafted(tmp_path) as (_, rollouts):
        learned = await until(rollouts, lambda answer: answer.num_promoted > 0)
        assert learned.serving.startswith("trained-")
        assert learned.training.num_tokens > 0
        assert len(trainers()) == 1
        home = tmp_path / "home.safetensors"
        assert (await rollouts.download_drafter(home)).startswith("trained-")

        await until(rollouts, lambda answer: answer.candidate is None)
        await rollouts.upload_drafter("worse", untrained(tmp_path))
        await until(rollouts, lambda answer: answer.candidate == "worse")
        told = await until(rollouts, lambda answer: answer.candidate != "worse")
        assert told.serving != "worse"
        assert told.num_rolled_back > 0
        by_drafter = {pair.drafter: pair for pair in told.acceptance}
        assert by_drafter["worse"].num_first_tokens_accepted < 0.1 * by_drafter["worse"].num_drafts

        other = write_model(tmp_path / "other", random_tensors(1, tied=True), tied=True)
        with pytest.raises(WeightsRefused, match="shape"):
            await rollouts.upload_drafter("other", other / "model.safetensors")
    assert not trainers()
    [folder] = (tmp_path / "cache" / "drafter").iterdir()
    kept = json.loads((folder / "serving.json").read_text())["version"]
    assert (folder / f"{kept}.safetensors").stat().st_size == home.stat().st_size
    assert (folder / "training.safetensors").exists()


def untrained(tmp_path: Path) -> Path:
    """An untrained drafter of the same shapes."""
    [folder] = (tmp_path / "cache" / "drafter").iterdir()
    config = json.loads((folder / "start" / "config.json").read_text())
    write_random_model(tmp_path / "untrained", config)
    return tmp_path / "untrained" / "model.safetensors"

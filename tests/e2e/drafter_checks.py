"""Drafter checks of the end-to-end scene: which samples were drafted, by which drafter."""

import asyncio
import re

from safetensors.numpy import load_file

from engine.types.feature_stats import SpeculationStats
from tests.e2e.scene import Scene

PROMPT = [7, 20, 21, 22]


async def submit_drafter(system: Scene) -> None:
    """Uploads a drafter.

    It waits for its A/B test, or runs it, while all other checks run.
    """
    answer = await system.rollouts.upload_drafter(
        "brought", system.models["v8"] / "model.safetensors"
    )
    assert answer.training.state in ("running", "paused")


async def check_drafter_still_drafts(system: Scene) -> None:
    answer = await system.rollouts.drafter()
    assert "v8" in {pair.weights for pair in answer.acceptance if pair.num_draft_tokens}
    assert answer.num_failed == 0
    assert answer.training.state in ("running", "paused")
    home = system.models["v7"].parent / "home.safetensors"
    assert await system.rollouts.download_drafter(home)
    assert load_file(home).keys() == load_file(system.models["v7"] / "model.safetensors").keys()
    metrics = (await system.served.http.get("/metrics")).text
    assert re.search(r"^coppice_drafter_acceptance_ratio\{.+\} \S+$", metrics, re.MULTILINE)


async def check_opted_out_samples(system: Scene) -> None:
    """Asserts that opted-out samples got no drafts and all others did."""
    assert system.engine.info.max_context_tokens == 512
    refused = await system.greedy([PROMPT], 20, n=2, speculation=False)
    assert [len(sample.token_ids) for sample in refused.groups[0].samples] == [20, 20]
    async with asyncio.timeout(120):
        while system.engine.stats(SpeculationStats).skipped.get("disabled", 0) < 2:
            await asyncio.sleep(0.1)
    counts = system.engine.stats(SpeculationStats)
    assert counts.skipped.get("failed", 0) == 0
    # How many drafts are worth verifying is measured, and may be none on this machine.
    suspended = counts.steps.get("not_worth_it", 0) + counts.steps.get("suspended", 0)
    assert sum(counts.accepted.values()) + suspended > 0
    metrics = (await system.served.http.get("/metrics")).text
    assert re.search(r"^coppice_speculation_gain_ratio \S+$", metrics, re.MULTILINE)

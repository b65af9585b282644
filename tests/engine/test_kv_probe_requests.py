"""Requests of probes that end early, with a fake of vLLM's requests."""

import asyncio
from typing import Any

import pytest

from engine.kv_versions.measurement import ProbeRequests
from engine.types import SampleRequest, Sampling


class BlockedGeneration:
    """Submission that has sent its request to EngineCore and waits."""

    def __init__(self) -> None:
        self.submitted = asyncio.Event()
        self.aborted: list[str] = []

    async def submit(self, samples: Any, *args: Any) -> Any:
        self.submitted.set()
        await asyncio.Event().wait()

    async def abort(self, sample_ids: Any) -> None:
        self.aborted += sample_ids


async def test_cancelled_submission_of_a_probe_is_aborted() -> None:
    generation: Any = BlockedGeneration()
    request = SampleRequest(id="probe", prompt_token_ids=[1], sampling=Sampling(max_tokens=1))
    sampling = asyncio.create_task(ProbeRequests(generation, 100).sample(request))
    await generation.submitted.wait()
    sampling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sampling
    assert generation.aborted == ["probe"]

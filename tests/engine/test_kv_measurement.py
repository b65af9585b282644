"""Measurements across updates and cancelled submissions, with a fake of vLLM's requests."""

import asyncio
from typing import Any

import numpy as np
import pytest

from engine.errors import FilesRestored, LoadFailed
from engine.feature_stats import KeptKvStats
from engine.kv_versions.measurement import KvMeasurement, ProbeRequests
from engine.types import Completion, KeptKv, SampleRequest, Sampling, TopLogprobRows, VersionSpan

LOGPROB = float(np.log(0.5))


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


class FakeGeneration:
    """Requests over KV of one update before, with equal distributions over exact KV."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    async def submit(self, samples: Any, *args: Any) -> Any:
        return [self._sample()]

    async def _sample(self) -> Completion:
        await self.may_end.wait()
        return Completion(
            token_ids=[7],
            logprobs=[LOGPROB],
            finish="length",
            versions=(VersionSpan(version="v1", start=0, end=1),),
            num_cached_tokens=0,
            top_logprobs=_rows(1),
            kv_lag=1,
        )

    async def given_logprobs(self, prompt: Any, *args: Any, **kwargs: Any) -> TopLogprobRows:
        return _rows(len(prompt))


def _rows(num: int) -> TopLogprobRows:
    ids = np.tile(np.array([7, 7, 8], np.int32), (num, 1))
    return TopLogprobRows(ids, np.full((num, 3), LOGPROB, np.float32), np.ones(num, np.int64))


class Core:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    async def call_cores(self, *args: Any) -> None:
        self.calls.append(args)


async def measurement(core: Any, generation: Any) -> KvMeasurement:
    """Measurement of one chain, whose KV is of one update before."""
    made = KvMeasurement(core, generation, 1000)
    request = SampleRequest(
        id="last",
        prompt_token_ids=[1] * 10,
        sampling=Sampling(max_tokens=1),
        kept_kv=KeptKv(chain="chain", owner="owner", max_kl=0.1),
    )
    completion = Completion(
        token_ids=[7], logprobs=[LOGPROB], finish="length", versions=(), num_cached_tokens=0
    )
    made.contexts.on_finished(request, completion)
    async with made.updating(keeps_kv=True):
        pass
    return made


@pytest.mark.parametrize("ends_while_loading", [True, False])
async def test_failed_load_does_not_discard_a_measurement(*, ends_while_loading: bool) -> None:
    core, generation = Core(), FakeGeneration()
    made = await measurement(core, generation)
    measuring = asyncio.create_task(made.run(100, 0))
    await asyncio.sleep(0)
    with pytest.raises(LoadFailed):
        async with made.updating(keeps_kv=True):
            if ends_while_loading:
                generation.may_end.set()
                await asyncio.sleep(0.01)
                assert core.calls == []
            raise LoadFailed("unreadable")
    generation.may_end.set()
    await measuring
    assert core.calls == [("coppice_set_kv_divergence", [("owner", 1, pytest.approx(0))])]


async def test_update_discards_a_measurement_that_ends_meanwhile() -> None:
    core, generation = Core(), FakeGeneration()
    made = await measurement(core, generation)
    measuring = asyncio.create_task(made.run(100, 0))
    async with made.updating(keeps_kv=True):
        generation.may_end.set()
        await asyncio.sleep(0.01)
    await measuring
    assert core.calls == []


async def test_restored_files_discard_measurements_and_contexts() -> None:
    core, generation = Core(), FakeGeneration()
    generation.may_end.set()
    made = await measurement(core, generation)
    await made.run(100, 0)
    updates = made.contexts.num_updates
    assert made.add_to(KeptKvStats()).divergences
    with pytest.raises(FilesRestored):
        async with made.updating(keeps_kv=True):
            raise FilesRestored("v0")
    assert made.contexts.num_updates == updates + 1
    assert not made.add_to(KeptKvStats()).divergences
    await made.run(100, 0)
    assert len(core.calls) == 1, "no context is left to be measured"


async def test_repeated_measurement_adds_chains_that_ended_since() -> None:
    core, generation = Core(), FakeGeneration()
    generation.may_end.set()
    made = await measurement(core, generation)
    await made.run(100, 0)
    await made.run(100, 0)
    assert len(core.calls) == 1, "nothing new was measured"
    later = SampleRequest(
        id="later",
        prompt_token_ids=[1] * 10,
        sampling=Sampling(max_tokens=1),
        kept_kv=KeptKv(chain="other", owner="other", max_kl=0.1),
    )
    made.contexts.on_finished(later, await generation._sample())
    await made.run(100, 0)
    assert [owner for owner, _, _ in core.calls[-1][1]] == ["other", "owner"]


async def test_cancelled_submission_of_a_probe_is_aborted() -> None:
    generation: Any = BlockedGeneration()
    request = SampleRequest(id="probe", prompt_token_ids=[1], sampling=Sampling(max_tokens=1))
    sampling = asyncio.create_task(ProbeRequests(generation, 100).sample(request))
    await generation.submitted.wait()
    sampling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sampling
    assert generation.aborted == ["probe"]

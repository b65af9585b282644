"""`finish`: enough samples, or enough time."""

import asyncio
from pathlib import Path
from typing import Any

from tests.fake_engine import FakeEngine
from tests.service.test_rollouts import body, group, running_samples
from tests.serving import Served, serving


def post(served: Served, asked: dict[str, Any]) -> "asyncio.Task[Any]":
    return asyncio.create_task(served.http.post("/v1/rollouts", json=asked))


def shorten(engine: FakeEngine, *limits: int) -> None:
    """Gives the running samples, in order, limits of their own."""
    for sample, limit in zip(engine.running.values(), limits, strict=True):
        sample.limit = limit


async def test_the_first_samples_are_enough_and_the_others_end_with_their_tokens(
    tmp_path: Path,
) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        request = post(served, body(group(1, n=4), finish={"samples": 2}))
        await running_samples(served, 4)
        shorten(engine, 9, 3, 9, 3)
        engine.step(3)
        answered = (await request).json()["groups"][0]
    assert answered["outcome"] == "done"
    reasons = [sample["finish_reason"] for sample in answered["samples"]]
    assert reasons == ["surplus", "length", "surplus", "length"]
    assert all(len(sample["token_ids"]) == 3 for sample in answered["samples"])
    assert not engine.running


async def test_a_deadline_takes_what_there_is(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        request = post(served, body(group(1, n=2), finish={"deadline_seconds": 0.3}))
        await running_samples(served, 2)
        engine.step(2)
        answered = (await request).json()["groups"][0]
    assert answered["outcome"] == "partial"
    for sample in answered["samples"]:
        assert (sample["finish_reason"], len(sample["token_ids"])) == ("deadline", 2)


async def test_a_deadline_that_is_not_reached_changes_nothing(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        asked = body(group(1), finish={"deadline_seconds": 60})
        assert (await post(served, asked)).json()["outcome"] == "done"


async def test_more_than_n_samples_are_never_needed(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        refused = await post(served, body(group(1, n=2), finish={"samples": 3}))
    assert refused.json()["code"] == "invalid_request"

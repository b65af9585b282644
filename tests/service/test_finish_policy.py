"""`finish`: early termination by sample count or by deadline."""

import asyncio
from pathlib import Path
from typing import Any

from tests.fake_engine import FakeEngine
from tests.service.loop_time import forward, in_forwardable_loop
from tests.service.test_rollouts import body, group, running_samples
from tests.serving import Served, serving


def post(served: Served, asked: dict[str, Any]) -> "asyncio.Task[Any]":
    return asyncio.create_task(served.http.post("/v1/rollouts", json=asked))


def shorten(engine: FakeEngine, *limits: int) -> None:
    """Assigns length limits to the running samples, in order."""
    for sample, limit in zip(engine.running.values(), limits, strict=True):
        sample.limit = limit


async def test_first_k_samples_suffice_and_others_end_with_their_tokens(
    tmp_path: Path,
) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        request = post(served, body(group(1, n=4), finish={"num_samples": 2}))
        await running_samples(served, 4)
        shorten(engine, 9, 3, 9, 3)
        engine.step(3)
        answered = (await request).json()["groups"][0]
    assert answered["outcome"] == "done"
    reasons = [sample["finish_reason"] for sample in answered["samples"]]
    assert reasons == ["surplus", "length", "surplus", "length"]
    assert all(len(sample["token_ids"]) == 3 for sample in answered["samples"])
    assert not engine.running


@in_forwardable_loop
async def test_deadline_returns_what_was_sampled(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        request = post(served, body(group(1, n=2), finish={"deadline_seconds": 10}))
        await running_samples(served, 2)
        engine.step(2)
        await forward(10)
        answered = (await request).json()["groups"][0]
    assert answered["outcome"] == "partial"
    for sample in answered["samples"]:
        assert (sample["finish_reason"], len(sample["token_ids"])) == ("deadline", 2)


async def test_unreached_deadline_changes_nothing(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        asked = body(group(1), finish={"deadline_seconds": 60})
        assert (await post(served, asked)).json()["outcome"] == "done"


async def test_k_greater_than_n_is_refused(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        refused = await post(served, body(group(1, n=2), finish={"num_samples": 3}))
    assert refused.json()["code"] == "invalid_request"


async def finished(engine: FakeEngine, served: Served, asked: dict[str, Any], *limits: int) -> Any:
    request = post(served, asked)
    await running_samples(served, len(limits))
    shorten(engine, *limits)
    while not request.done():
        engine.step()
        await asyncio.sleep(0.001)
    return (await request).json()["groups"][0]


async def test_answer_reports_the_selected_samples(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        asked = body(group(1, n=4), finish={"num_samples": 2})
        answered = await finished(engine, served, asked, 30, 9, 30, 3)
        assert answered["selected"] == [1, 3]


@in_forwardable_loop
async def test_no_samples_are_selected_if_too_few_end_before_the_deadline(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        asked = body(group(1, n=2), finish={"num_samples": 2, "deadline_seconds": 10})
        request = post(served, asked)
        await running_samples(served, 2)
        shorten(engine, 3, 10**9)
        engine.step(3)
        await forward(10)
        assert (await request).json()["groups"][0]["selected"] is None


async def test_random_selection_is_independent_of_lengths(tmp_path: Path) -> None:
    """The same samples whichever end first."""
    engine = FakeEngine(instant=False)
    selected = []
    async with serving(engine, tmp_path) as served:
        for limits in ([5, 10, 15, 20], [20, 15, 10, 5]):
            asked = body(group(1, n=4, seed=3), finish={"num_samples": 2, "select": "random"})
            answered = await finished(engine, served, asked, *limits)
            selected.append(answered["selected"])
            ends = [sample["finish_reason"] for sample in answered["samples"]]
            last = max(limits[index] for index in answered["selected"])
            assert ends == ["surplus" if limit > last else "length" for limit in limits]
    assert selected[0] == selected[1]


async def test_balanced_selection_covers_the_range_of_lengths(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        asked = body(group(1, n=6), finish={"num_samples": 3, "select": "balanced_length"})
        answered = await finished(engine, served, asked, 20, 5, 30, 10, 15, 25)
    assert answered["selected"] == [1, 4, 5]
    assert answered["samples"][2]["finish_reason"] == "surplus"
    assert answered["outcome"] == "done"

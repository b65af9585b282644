"""Event loop latency while the largest requests are started and answered."""

import asyncio
import gc
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.http.responses import PART_BYTES, LargeResponse
from service.http.serve import tuned
from service.rollouts.fairness import Turns
from tests.fake_engine import FakeEngine
from tests.serving import serving


@pytest.fixture
def without_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collections")
@pytest.mark.parametrize(("num_groups", "n"), [(4096, 1), (4096, 4), (16, 1024)])
async def test_no_loop_iteration_takes_a_large_part_of_a_large_rollout(
    tmp_path: Path, num_groups: int, n: int
) -> None:
    """In CPU time, which other processes do not inflate as they do wall time."""
    groups = [{"prompt": {"token_ids": [1]}, "n": n}] * num_groups
    body = json.dumps({"groups": groups, "sampling": {"max_tokens": 1}}).encode()
    turns: list[float] = []

    async def watch() -> None:
        while True:
            began = time.thread_time()
            await asyncio.sleep(0.0005)
            turns.append(time.thread_time() - began)

    async with serving(FakeEngine(), tmp_path) as served:
        served.http.timeout = 600
        watching = asyncio.create_task(watch())
        answer = await served.http.post(
            "/v1/rollouts", content=body, headers={"content-type": "application/json"}
        )
        watching.cancel()
        assert answer.json()["usage"]["num_samples"] == num_groups * n
    assert max(turns) < 0.2 * sum(turns)


async def test_turns_are_granted_in_order_and_bounded_in_number() -> None:
    turns, order = Turns(per_turn=4), list[int]()

    async def work(number: int) -> None:
        await turns.wait()
        order.append(number)

    tasks = [asyncio.create_task(work(number)) for number in range(100)]
    tasks[50].cancel()
    num_turns = 0
    while len(order) < 99:
        before = len(order)
        await asyncio.sleep(0)
        assert len(order) - before <= 8
        num_turns += 1
    assert order == [number for number in range(100) if number != 50]
    assert num_turns >= 99 // 8


async def test_large_response_is_sent_in_parts() -> None:
    body = bytes(range(256)) * (3 * PART_BYTES // 256) + b"end"
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is received")

    await LargeResponse(body, media_type="text/plain")({"type": "http"}, receive, send)
    start, *parts = sent
    assert (b"content-length", str(len(body)).encode()) in start["headers"]
    assert b"".join(part["body"] for part in parts) == body
    assert max(len(part["body"]) for part in parts) == PART_BYTES
    assert [part["more_body"] for part in parts] == [True] * (len(parts) - 1) + [False]


async def test_interpreter_is_tuned_while_the_server_runs() -> None:
    before, switch = gc.get_threshold(), sys.getswitchinterval()
    collections = gc.get_stats()[2]["collections"]
    collecting = asyncio.create_task(tuned(0.01))
    await asyncio.sleep(0.1)
    assert gc.get_stats()[2]["collections"] > collections
    assert gc.get_threshold()[2] > before[2] and sys.getswitchinterval() < switch
    collecting.cancel()
    await asyncio.gather(collecting, return_exceptions=True)
    assert gc.get_threshold() == before
    assert sys.getswitchinterval() == pytest.approx(switch)

"""Event loop latency while the largest requests are started and answered."""

import asyncio
import gc
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from coppice.wire.logprobs import TokenLogprobs
from coppice.wire.result_formats import SampleRecord
from coppice.wire.rollouts import GroupAnswer, RolloutAnswer, SampleAnswer, Usage, VersionSpan
from coppice.wire.routed_experts import RoutedExperts
from coppice.wire.support import SupportAnswer
from service.http.responses import PART_BYTES, rollout_parts, table_fragments, value_parts
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


@pytest.mark.parametrize("tree", [False, True])
def test_answer_in_parts_equals_the_answer(tree: bool) -> None:
    sample = SampleAnswer(
        index=0,
        token_ids=[1, 2],
        logprobs=[-0.5, -0.25],
        text='"samples":[] "groups":[] "segments":[]',
        finish_reason="stop",
        versions=[VersionSpan(version="v", start=0, end=2)],
    )
    segment = {"id": "0.0", "depth": 0, "token_ids": [1], "logprobs": [-1.0], "versions": []}
    group = GroupAnswer.model_validate(
        {
            "id": '"samples":[]',
            "index": 0,
            "outcome": "done",
            "num_prompt_tokens": 1,
            "num_cached_tokens": 0,
            "samples": [sample] * 3000,
            "segments": [{**segment, "finish_reason": "stop"}] * 2 if tree else None,
        }
    )
    usage = Usage(num_prompt_tokens=1, num_generated_tokens=1, num_samples=1)
    answer = RolloutAnswer(id="r", outcome="done", groups=[group] * 3, usage=usage)
    parts = list(rollout_parts(answer))
    assert b"".join(parts) == answer.model_dump_json().encode()
    assert len(parts) > 1 and max(map(len, parts)) < 2 * PART_BYTES


@pytest.mark.parametrize("num_bytes", [0, 1, 1_000_001])
def test_binary_data_of_a_record_is_encoded_in_slices(num_bytes: int) -> None:
    experts = np.arange(num_bytes).astype(np.uint8).reshape(-1, 1, 1)
    sample = SampleAnswer(
        index=0,
        token_ids=[1],
        logprobs=[-0.5],
        text='"data":""',
        finish_reason="stop",
        versions=[],
        support=SupportAnswer(vocab_size=8, lengths=[num_bytes], data="QUJD" * num_bytes),
        top_logprobs=TokenLogprobs.empty(1),
        routed_experts=RoutedExperts.of(0, experts),
    )
    record = SampleRecord(group=0, sample=sample)
    fragments = list(table_fragments(record, exclude_none=True))
    assert b"".join(fragments) == record.model_dump_json(exclude_none=True).encode()
    assert max(map(len, fragments)) < 2 * PART_BYTES


@pytest.mark.parametrize(
    "value",
    [{}, [], {"a": []}, [{"a": 1}, {"b": [{"c": 2}]}], {"x": [{"é": None}], "y": {"z": [1]}}, 1],
)
def test_values_in_parts_equal_the_values(value: object) -> None:
    assert json.loads(b"".join(value_parts(value))) == value


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

"""A moved rollout has the results, durations and callers that it would have without the move."""

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.cluster.in_memory_registry import InMemoryRegistry
from service.handoff.rollout_state import estimated_bytes
from tests.service.cluster.test_handoff import (
    LONG,
    PROMPT,
    engine_of,
    holder_first,
    offered_state,
    post,
    replicas,
    see_each_other,
)
from tests.service.cluster.test_handoff_outcomes import sender_of
from tests.service.test_rollouts import body, group, running_samples

pytestmark = pytest.mark.slow


async def test_stream_that_nobody_could_find_is_not_moved(tmp_path: Path) -> None:
    async with replicas(tmp_path, InMemoryRegistry()) as (a, b):
        await see_each_other(a, b)
        calling = asyncio.create_task(post(a, body(PROMPT, **LONG, stream=True)))
        await running_samples(a, 2)
        await sender_of(a).send_all(0.1)
        assert engine_of(b).submitted == []
        engine_of(a).step(12)
        assert json.loads((await calling).text.splitlines()[-1])["outcome"] == "done"


async def test_caller_that_leaves_after_the_move_ends_its_rollout(tmp_path: Path) -> None:
    async with replicas(tmp_path, InMemoryRegistry()) as (a, b):
        await see_each_other(a, b)
        async with httpx.AsyncClient(base_url=a.url, timeout=60) as http:
            request = body(PROMPT, **LONG)
            calling = http.post("/v1/rollouts", json=request, follow_redirects=True)
            waiting = asyncio.create_task(calling)
            await running_samples(a, 2)
            await sender_of(a).send_all(30)
            await running_samples(b, 2)
            await asyncio.sleep(0.2)  # the caller follows
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                await waiting
        while b.server.rollouts.num_running:
            await asyncio.sleep(0.001)
        assert engine_of(b).running == {}


async def test_tokens_of_a_moved_result_are_streamed(tmp_path: Path) -> None:
    async with replicas(tmp_path, InMemoryRegistry()) as (a, b):
        await see_each_other(a, b)
        given = {
            "token_ids": [3, 4],
            "logprobs": [-1.0, -1.0],
            "versions": [{"version": "v0", "start": 0, "end": 2}],
        }
        request = body(
            group(1, 2, 3), **LONG, stream_tokens=True, continue_from={"samples": [given]}
        )
        accepted = await a.http.post(
            "/v1/rollouts", json=request, headers={"prefer": "respond-async"}
        )
        await running_samples(a, 1)
        engine_of(a).step(12)
        while a.server.rollouts.num_running:
            await asyncio.sleep(0.001)
        await sender_of(a).send_all(30)
        lines = await b.http.get(
            accepted.headers["location"], headers={"accept": "application/x-ndjson"}
        )
        records = [json.loads(line) for line in lines.text.splitlines()]
        (tokens,) = [each for each in records if each["type"] == "tokens"]
        assert (tokens["start"], len(tokens["token_ids"])) == (2, 10)


async def test_more_given_tokens_than_a_sample_has_are_refused(tmp_path: Path) -> None:
    async with replicas(tmp_path, InMemoryRegistry()) as (a, b):
        state = offered_state(a) | {"given": [{"group": 0, "index": 0, "num_tokens": 2}]}
        response = await b.http.post("/v1/handoff/rollouts", json=state)
        assert (response.status_code, b.server.admission.num_samples) == (422, 0)
        assert len(b.server.idempotency_keys) == 0


async def test_durations_include_the_time_before_the_move(tmp_path: Path) -> None:
    async with replicas(tmp_path, InMemoryRegistry()) as (a, b):
        await see_each_other(a, b)
        calling = asyncio.create_task(post(a, body(PROMPT, **LONG)))
        await running_samples(a, 2)
        next(iter(engine_of(a).running.values())).limit = 1
        engine_of(a).step(1)
        await asyncio.sleep(0.5)
        await sender_of(a).send_all(30)
        await running_samples(b, 1)
        (rollout,) = b.server.rollouts.in_flight()
        (moved,) = rollout.groups
        engine_of(b).step(12)
        await calling
        first, second = moved.sample_seconds
        assert first < second
        assert second >= 0.5


async def test_moved_rollout_is_found_before_the_drain_is_known(tmp_path: Path) -> None:
    async with replicas(tmp_path, InMemoryRegistry(), 3) as (a, b, c):
        await see_each_other(a, b, c)
        calling = asyncio.create_task(post(a, body(PROMPT, **LONG)))
        await running_samples(a, 2)
        await sender_of(a).send_all(30)
        holder, other = await holder_first(b, c)
        (rollout,) = holder.server.rollouts.in_flight()
        seen = other.server.cluster.find(a.server.cluster.own_id)
        assert seen is not None
        assert seen.state == "serving"
        response = await other.http.get(f"/v1/rollouts/{rollout.id}")
        assert response.headers["location"].startswith(holder.url)
        await running_samples(holder, 2)
        engine_of(holder).step(12)
        await calling


async def test_rollout_that_is_too_large_is_not_suspended(tmp_path: Path) -> None:
    async with replicas(tmp_path, InMemoryRegistry()) as (a, b):
        await see_each_other(a, b)
        calling = asyncio.create_task(post(a, body(PROMPT, **LONG)))
        await running_samples(a, 2)
        engine_of(a).step(8)
        (rollout,) = a.server.rollouts.in_flight()
        size = estimated_bytes(rollout, engine_of(a))
        await sender_of(a, max_bytes=size - 1).send_all(0.1)
        assert (len(engine_of(a).submitted), engine_of(b).submitted) == (2, [])
        await sender_of(a, max_bytes=size).send_all(30)
        await running_samples(b, 2)
        engine_of(b).step(12)
        assert (await calling).json()["outcome"] == "done"


COLUMNS = {
    "return_support": True,
    "top_logprobs": 2,
    "logprob_token_ids": [4, 5],
    "logprobs_mode": "raw_logprobs",
    "return_routed_experts": True,
}


@pytest.mark.parametrize("wanted", [*({name: COLUMNS[name]} for name in COLUMNS), COLUMNS], ids=str)
async def test_columns_are_those_without_a_hand_over(
    tmp_path: Path, wanted: dict[str, Any]
) -> None:
    given = {
        "token_ids": [3, 4],
        "logprobs": [-1.0, -1.0],
        "versions": [{"version": "v0", "start": 0, "end": 2}],
    }
    if "logprobs_mode" in wanted:
        given["raw_logprobs"] = [-1.0, -1.0]
    if "return_support" in wanted:
        given["support"] = {"vocab_size": 256, "lengths": [1, 1], "data": "AAA="}
    request = body(
        group(1, 2, 3, n=3, seed=7), **LONG, **wanted, continue_from={"samples": [given]}
    )
    async with replicas(tmp_path, InMemoryRegistry()) as (a, b):
        await see_each_other(a, b)
        answers = []
        for num_before in (10, 4, 0):
            calling = asyncio.create_task(post(a, request))
            await running_samples(a, 3)
            engine_of(a).step(num_before)
            await sender_of(a).send_all(30)
            if num_before < 10:
                await running_samples(b, 2 if num_before > 6 else 3)
            for served in (a, b):
                engine_of(served).step(12)
            answers.append((await calling).json())
    assert (len(engine_of(a).submitted), len(engine_of(b).submitted)) == (9, 8)
    first, *others = [answer["groups"][0]["samples"] for answer in answers]
    names = {"top_logprobs", "given_logprobs", "raw_logprobs", "support", "routed_experts"}
    assert len(names & first[0].keys()) == len(wanted)
    assert [others[0], others[1]] == [first, first]

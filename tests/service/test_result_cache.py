"""Memory of finished rollouts in the result cache."""

import asyncio
import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from coppice.wire.rollouts import SampleAnswer
from service.rollouts.result_log import ResultLog
from service.rollouts.result_log import _num_bytes as num_part_bytes
from service.rollouts.rollout import Rollout
from tests.fake_engine import FakeEngine
from tests.serving import Served, serving

PROMPT = [1] * 100_000
REQUESTS: dict[str, dict[str, Any]] = {
    "one long prompt": {"groups": [{"prompt": {"token_ids": PROMPT}}]},
    "many samples": {
        "groups": [{"prompt": {"token_ids": PROMPT}, "n": 512}],
        "sampling": {"max_tokens": 1},
    },
    "many groups": {
        "groups": [{"prompt": {"token_ids": [1] * 100}} for _ in range(500)],
        "sampling": {"max_tokens": 2},
    },
    "an echoed prompt": {"groups": [{"prompt": {"token_ids": PROMPT}}], "echo": True},
    "prompt logprobs": {
        "groups": [{"prompt": {"token_ids": PROMPT}}],
        "prompt_logprobs": 4,
    },
    "text": {"groups": [{"prompt": {"text": "a" * 20_000}, "n": 4}]},
    "a tree": {
        "groups": [{"prompt": {"token_ids": PROMPT}}],
        "branching": {"mode": "interval", "max_leaves": 8, "interval": 32},
        "sampling": {"max_tokens": 256},
    },
    "spans": {
        "groups": [{"prompt": {"spans": [{"token_ids": PROMPT, "cache_key": "a"}] * 3}}],
        "kv_reuse": {"mode": "splice"},
    },
}


def held_bytes(root: object) -> int:
    """Memory of all plain values, models and dataclasses reachable from an object."""
    total, seen, waiting = 0, set[int](), [root]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        total += sys.getsizeof(value)
        if isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | frozenset):
            waiting += value
        elif isinstance(value, BaseModel):
            waiting += [value.__dict__, value.model_fields_set]
        elif isinstance(value, Rollout | ResultLog):
            waiting.append(vars(value))
        elif dataclasses.is_dataclass(value):
            waiting += [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return total


@pytest.mark.parametrize("case", REQUESTS)
async def test_result_cache_counts_the_memory_of_a_rollout(tmp_path: Path, case: str) -> None:
    engine = FakeEngine(max_context_tokens=10**6)
    asked = {"sampling": {"max_tokens": 64}, **REQUESTS[case]}
    async with serving(engine, tmp_path) as served:
        accepted = await served.http.post(
            "/v1/rollouts", json=asked, headers={"prefer": "respond-async"}
        )
        assert accepted.status_code == 202, accepted.json()
        place = accepted.headers["location"]
        assert (await served.http.get(place, params={"wait": 60})).status_code == 200
        await asyncio.sleep(0)
        kept = served.server.rollouts.get(accepted.json()["id"], owner="local")
        assert held_bytes(kept) <= kept.log.num_bytes


def test_messages_of_samples_are_counted() -> None:
    call = {"id": "c", "name": "f", "arguments": "x" * 10_000}
    message = {"content": "y" * 30_000, "reasoning": "z" * 20_000, "tool_calls": [call] * 2}
    sample = {"index": 0, "token_ids": [], "logprobs": [], "versions": [], "finish_reason": "stop"}
    answer = SampleAnswer.model_validate({**sample, "message": message})
    assert held_bytes(answer) <= num_part_bytes(answer)


async def test_result_above_the_limit_does_not_evict_the_others(tmp_path: Path) -> None:
    async def ended(served: Served, num_tokens: int) -> str:
        asked = {"groups": [{"prompt": {"token_ids": [1] * num_tokens}}], "echo": True}
        accepted = await served.http.post(
            "/v1/rollouts",
            json={**asked, "sampling": {"max_tokens": 1}},
            headers={"prefer": "respond-async"},
        )
        place = str(accepted.headers["location"])
        while served.server.rollouts.num_running:
            await asyncio.sleep(0)
        return place

    engine, limits = FakeEngine(max_context_tokens=10**6), {"keep_answers_bytes": 60_000}
    async with serving(engine, tmp_path, limits=limits) as served:
        small, large = await ended(served, 1), await ended(served, 10_000)
        assert (await served.http.get(large)).status_code == 404
        assert (await served.http.get(small)).status_code == 200

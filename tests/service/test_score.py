"""POST /v1/score."""

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fake_engine import FakeEngine
from tests.serving import Served, serving


async def score(served: Served, *responses: list[int], **rest: Any) -> httpx.Response:
    item = {"prompt": {"token_ids": [1, 2]}, "responses": list(responses)}
    return await served.http.post("/v1/score", json={"items": [item], **rest})


async def test_every_response_gets_a_logprob_per_token_and_its_version(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        answer = (await score(served, [5, 6, 7], [8])).json()
    assert answer["items"] == [
        {
            "num_prompt_tokens": 2,
            "responses": [
                {"logprobs": [-2.0, -3.0, -4.0], "version": "v0"},
                {"logprobs": [-2.0], "version": "v0"},
            ],
        }
    ]


@pytest.mark.parametrize(
    ("responses", "code"),
    [
        ([], "invalid_request"),
        ([[]], "invalid_request"),
        ([[256]], "invalid_request"),
        ([[1] * 510], "prompt_too_long"),
    ],
)
async def test_invalid_score_request_is_refused(
    tmp_path: Path, responses: list[list[int]], code: str
) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        refused = await score(served, *responses)
    assert (refused.status_code, refused.json()["code"]) == (422, code)


class NanEngine(FakeEngine):
    """An engine whose weights give NaN logits from the third token of a text on."""

    async def score(
        self, prompt: Sequence[int], response: Sequence[int], adapter: str | None = None
    ) -> list[float]:
        scores = await super().score(prompt, response, adapter)
        return [math.nan if len(prompt) + i > 1 else each for i, each in enumerate(scores)]


@pytest.mark.parametrize("fields", [{}, {"top_logprobs": 2}])
async def test_logprobs_that_are_nan_are_refused(tmp_path: Path, fields: dict[str, int]) -> None:
    async with serving(NanEngine(), tmp_path) as served:
        refused = await score(served, [5, 6], **fields)
        rollout = {"groups": [{"prompt": {"token_ids": [1, 2, 3]}}], "prompt_logprobs": 0}
        refused_rollout = await served.http.post("/v1/rollouts", json=rollout)
    for answer in (refused, refused_rollout):
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
        assert answer.json()["detail"] == "the logits of these tokens are NaN with the weights v0"


async def test_response_interrupted_by_an_activation_is_scored_again(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        await served.http.put("/v1/weights/v1", content=b"w")
        engine.score_gate = asyncio.Event()
        scoring = asyncio.create_task(score(served, [5]))
        while engine.scored == 0:
            await asyncio.sleep(0.001)
        await served.http.post("/v1/weights/v1/activate", json={})
        engine.score_gate.set()
        answer = (await scoring).json()
    assert engine.scored == 2
    assert answer["items"][0]["responses"][0]["version"] == "v1"


async def test_weights_policies_apply_to_scoring(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        refused = await score(served, [5], weights={"exact_version": "v9"})
    assert (refused.status_code, refused.json()["code"]) == (409, "version_superseded")


async def test_engine_death_is_a_problem(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        engine.score_gate = asyncio.Event()
        scoring = asyncio.create_task(score(served, [5]))
        while engine.scored == 0:
            await asyncio.sleep(0.001)
        engine.die()
        refused = await score(served, [5])
        assert refused.json()["code"] == "engine_dead"
        engine.score_gate.set()
        await scoring


async def test_closed_connection_ends_the_scoring(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        engine.score_gate = asyncio.Event()
        async with httpx.AsyncClient(base_url=served.url) as leaving:
            item = {"prompt": {"token_ids": [1]}, "responses": [[2]]}
            request = asyncio.create_task(leaving.post("/v1/score", json={"items": [item]}))
            while engine.scored == 0:
                await asyncio.sleep(0.001)
            request.cancel()
        while engine.scoring:
            await asyncio.sleep(0.001)

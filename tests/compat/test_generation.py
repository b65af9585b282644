"""Answers and aborted requests of SGLang's API, and the list of models."""

import asyncio
from pathlib import Path
from typing import Any

from coppice.wire.rollouts import MAX_GROUPS
from service.http.bodies import MAX_JSON_VALUES
from tests.compat.third_party import Foreign, foreign
from tests.compat.wires import events_of

V0 = [{"version": "v0", "start": 0, "end": 2}]


async def test_sglang_answer_is_one_object_or_a_list(tmp_path: Path) -> None:
    sampling = {"max_new_tokens": 2, "stop": None, "no_stop_trim": True, "top_k": -1}
    async with foreign(tmp_path) as served:
        body = {"input_ids": [1, 2, 3], "sampling_params": sampling, "return_logprob": True}
        one = await served.post("/generate", body)
        several = await served.post("/generate", {**body, "input_ids": [[1], [1, 2]]})
        drawn = await served.post("/generate", {**body, "sampling_params": {**sampling, "n": 2}})
    assert one["output_ids"] == [3, 4]
    meta = one["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, 3, None], [-0.5, 4, None]]
    assert meta["finish_reason"] == {"type": "length", "length": 2}
    assert (meta["weight_version"], meta["weight_versions"]) == ("v0", V0)
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 2, 0)
    assert [row["output_ids"] for row in several] == [[1, 2], [2, 3]]
    assert len(drawn) == 2


async def partial(served: Foreign, body: dict[str, Any], abort: dict[str, Any]) -> Any:
    served.engine.instant = False
    asking = asyncio.create_task(served.post("/generate", body))
    while not served.engine.running:
        await asyncio.sleep(0.001)
    served.engine.step(3)
    assert await served.post("/abort_request", abort) == {"status": "ok"}
    return await asking


async def test_aborted_request_returns_its_tokens_so_far(tmp_path: Path) -> None:
    sampling = {"max_new_tokens": 50}
    body = {"input_ids": [1], "rid": "r1", "sampling_params": sampling, "return_logprob": True}
    for abort in ({"rid": "r1"}, {"abort_all": True}):
        async with foreign(tmp_path) as served:
            answer = await partial(served, body, abort)
            loads = (await served.http.get("/v1/loads?include=core")).json()["loads"]
        assert answer["output_ids"] == [1, 2, 3]
        assert len(answer["meta_info"]["output_token_logprobs"]) == 3
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert loads[0]["num_reqs"] == 0


async def test_request_id_of_another_caller_aborts_nothing(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        served.engine.instant = False
        body = {"input_ids": [1], "rid": "r1", "sampling_params": {"max_new_tokens": 5}}
        asking = asyncio.create_task(served.post("/generate", body))
        while not served.engine.running:
            await asyncio.sleep(0.001)
        await served.post("/abort_request", {"rid": "r2"})
        served.engine.step(5)
        assert (await asking)["meta_info"]["finish_reason"]["type"] == "length"


async def test_invalid_prompt_is_refused(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        both = {"input_ids": [1], "text": "a"}
        bodies: list[dict[str, Any]] = [{}, {"input_ids": []}, {"input_ids": [[]]}, both]
        for body in [*bodies, {"text": []}]:
            assert (await served.refused("/generate", body))[0] == 422
        too_many = [[1]] * (MAX_GROUPS + 1)
        assert (await served.refused("/generate", {"input_ids": too_many}))[0] == 422
        too_long = [1] * (MAX_JSON_VALUES + 1)
        for prompt in (too_long, [too_long]):
            assert (await served.refused("/v1/completions", {"prompt": prompt}))[0] == 413
            assert (await served.refused("/generate", {"input_ids": prompt}))[0] == 413


async def test_model_list_has_the_served_model(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        models = (await served.http.get("/v1/models")).json()["data"]
        await served.post("/v1/completions", {"prompt": "a", "model": models[0]["id"]})
    assert models[0]["max_model_len"] == 512


async def test_sglang_supports_are_those_of_the_native_answer(tmp_path: Path) -> None:
    native = {"groups": [{"prompt": {"token_ids": [1]}}], "sampling": {"max_tokens": 2}}
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}, "return_support": True}
    async with foreign(tmp_path) as served:
        answer = await served.post("/v1/rollouts", {**native, "return_support": True})
        whole = await served.post("/generate", body)
        streamed = (await served.http.post("/generate", json={**body, "stream": True})).text
    support = answer["groups"][0]["samples"][0]["support"]
    assert whole["meta_info"]["support"] == support and len(support["lengths"]) == 2
    assert events_of(streamed)[-1]["meta_info"]["support"] == support

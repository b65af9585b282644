"""Answers on the sampling routes of other servers."""

import asyncio
import json
from pathlib import Path
from typing import Any

from coppice.wire.rollouts import MAX_GROUPS
from service.http.bodies import MAX_JSON_VALUES
from tests.compat.third_party import Foreign, foreign
from tests.fake_engine import FakeEngine

USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 0},
}
V0 = [{"version": "v0", "start": 0, "end": 2}]


async def test_batch_is_answered_in_the_order_of_its_prompts(tmp_path: Path) -> None:
    """TRL slices the choices: a reordered list would be misassigned silently."""
    async with foreign(tmp_path) as served:
        answer = await served.post(
            "/v1/completions",
            {
                "prompt": [[1, 2], [1, 2, 3]],
                "n": 2,
                "max_tokens": 2,
                "logprobs": 0,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
            },
        )
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["prompt_token_ids"] for choice in choices] == [[1, 2]] * 2 + [[1, 2, 3]] * 2
    assert [choice["token_ids"] for choice in choices] == [[2, 3]] * 2 + [[3, 4]] * 2
    assert choices[3]["logprobs"]["tokens"] == ["token_id:3", "token_id:4"]
    assert choices[3]["logprobs"]["token_logprobs"] == [-0.5, -0.5]
    assert choices[3]["finish_reason"] == "length"
    assert choices[3]["weight_versions"] == V0


async def test_text_prompts_return_their_token_ids(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        body = {"prompt": ["ab", "abc"], "max_tokens": 1, "return_token_ids": True}
        choices = (await served.post("/v1/completions", body))["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [[97, 98], [97, 98, 99]]
    assert [choice["text"] for choice in choices] == ["\x02", "\x03"]
    assert choices[0]["logprobs"] is None


async def test_completions_default_to_sixteen_tokens_and_others_to_the_context(
    tmp_path: Path,
) -> None:
    async with foreign(tmp_path, FakeEngine(max_context_tokens=64)) as served:
        short = await served.post("/v1/completions", {"prompt": [1, 2]})
        whole = await served.post("/inference/v1/generate", {"token_ids": [1, 2]})
    assert short["usage"]["completion_tokens"] == 16
    assert whole["usage"]["completion_tokens"] == 62


async def test_generate_names_tokens_for_clients_of_either_vllm_version(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        body = {
            "token_ids": [1, 2, 3],
            "sampling_params": {"max_tokens": 2, "logprobs": 1, "stop_token_ids": [9]},
            "request_id": "r1",
        }
        answer = await served.post("/inference/v1/generate", body)
        [sample] = served.engine.submitted
    assert sample.sampling.stop_token_ids == (9,)
    assert (answer["request_id"], answer["usage"]) == ("r1", USAGE)
    [choice] = answer["choices"]
    assert (choice["token_ids"], choice["weight_versions"]) == ([3, 4], V0)
    assert choice["logprobs"]["content"] == [
        {"token": "token_id:3", "token_id": 3, "logprob": -0.5, "top_logprobs": []},
        {"token": "token_id:4", "token_id": 4, "logprob": -0.5, "top_logprobs": []},
    ]


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


async def test_stream_sends_each_choice_when_it_has_ended(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        body = {"prompt": [1, 2], "n": 2, "max_tokens": 2, "stream": True}
        answer = await served.http.post("/v1/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, last = [line for line in answer.text.split("\n\n") if line]
    assert last == "data: [DONE]"
    choices = [json.loads(chunk.removeprefix("data: "))["choices"][0] for chunk in chunks]
    assert sorted(choice["index"] for choice in choices) == [0, 1]


async def test_invalid_prompt_is_refused(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        prompts: list[Any] = [[], [[]], "", [1, [2]], [300], None]
        for prompt in prompts:
            assert (await served.refused("/v1/completions", {"prompt": prompt}))[0] == 400
        both = {"input_ids": [1], "text": "a"}
        bodies: list[dict[str, Any]] = [{}, {"input_ids": []}, {"input_ids": [[]]}, both]
        for body in [*bodies, {"text": []}]:
            assert (await served.refused("/generate", body))[0] == 422
        too_many = [[1]] * (MAX_GROUPS + 1)
        assert (await served.refused("/v1/completions", {"prompt": too_many}))[0] == 400
        assert (await served.refused("/generate", {"input_ids": too_many}))[0] == 422
        too_long = [1] * (MAX_JSON_VALUES + 1)
        for prompt in (too_long, [too_long]):
            assert (await served.refused("/v1/completions", {"prompt": prompt}))[0] == 413
            assert (await served.refused("/generate", {"input_ids": prompt}))[0] == 413


async def test_unknown_model_is_refused(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        models = (await served.http.get("/v1/models")).json()["data"]
        body = {"prompt": "a", "model": models[0]["id"]}
        await served.post("/v1/completions", body)
        status, problem = await served.refused("/v1/completions", {**body, "model": "gpt"})
    assert models[0]["max_model_len"] == 512
    assert (status, problem["errors"][0]["location"]) == (404, "model")

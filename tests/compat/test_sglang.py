"""SGLang's POST /generate: its fields, and the events of its streams."""

import asyncio
import itertools
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.types.samples import SampleRequest
from service.compat.sglang import generate as sglang_generate
from service.compat.sglang.body import (
    NEUTRAL,
    REFUSED,
    WITHOUT_EFFECT,
    SglangBody,
    SglangSampling,
)
from tests.compat.third_party import Foreign, foreign
from tests.fake_engine import FakeEngine

# managers/io_struct.py and sampling/sampling_params.py of SGLang at 001067fffe, which is not
# installed here.
REQUEST_FIELDS = """
    rid session_id text input_ids input_embeds image_data video_data audio_data mm_hashes
    mm_content_hashes use_audio_in_video video_config sampling_params return_logprob
    logprob_start_len top_logprobs_num token_ids_logprob return_sampling_mask
    return_text_in_logprobs return_flat_raw_top_logprobs return_flat_raw_top_logprobs_b64 stream
    log_metrics return_hidden_states return_routed_experts routed_experts_start_len
    return_indexer_topk modalities session_params lora_path lora_id custom_logit_processor
    positional_embed_overrides bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key
    decode_tp_size routed_dp_rank data_parallel_rank disagg_prefill_dp_rank kv_router_hint
    routing_key conversation_id http_worker_ipc background require_reasoning max_thinking_tokens
    priority extra_key no_logs custom_labels return_bytes return_entropy return_prompt_token_ids
    external_trace_header received_time need_wait_for_mm_inputs num_items_assigned encoder_urls
    max_dynamic_patch min_dynamic_patch image_max_dynamic_patch video_max_dynamic_patch
    images_config multi_item_delimiter_indices cache_salt
"""
SAMPLING_FIELDS = """
    max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty
    presence_penalty repetition_penalty min_new_tokens n json_schema regex ebnf structural_tag
    ignore_eos skip_special_tokens spaces_between_special_tokens no_stop_trim custom_params
    stream_interval logit_bias sampling_seed
"""
BODY: dict[str, Any] = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4}}
TEXT = "@ABCDE"


async def events_of(answer: httpx.Response) -> AsyncIterator[Any]:
    """The values of a stream that ends with [DONE]."""
    buffer = b""
    async for content in answer.aiter_bytes():
        *events, buffer = (buffer + content).split(b"\n\n")
        for event in events:
            if event == b"data: [DONE]":
                return
            yield json.loads(event.removeprefix(b"data: "))
    raise AssertionError("the stream ended without [DONE]")


@asynccontextmanager
async def streaming(
    served: Foreign, body: dict[str, Any], num_samples: int = 1
) -> AsyncIterator[AsyncIterator[Any]]:
    """The events of a request whose samples run in the engine."""
    async with served.http.stream("POST", "/generate", json={**body, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        async with asyncio.timeout(30):
            while len(served.engine.running) < num_samples:
                await asyncio.sleep(0.001)
        yield events_of(answer)


def placed(fields: dict[str, Any], *, in_sampling: bool) -> dict[str, Any]:
    if in_sampling:
        return {**BODY, "sampling_params": {**BODY["sampling_params"], **fields}}
    return {**BODY, **fields}


async def submitted(served: Foreign, body: dict[str, Any]) -> list[SampleRequest]:
    """The requests of the engine, without their names and their rank of arrival."""
    served.engine.submitted.clear()
    await served.post("/generate", body)
    return [replace(each, id="", group="", priority=0) for each in served.engine.submitted]


def test_every_field_of_sglang_is_served_neutral_or_refused() -> None:
    theirs = {*REQUEST_FIELDS.split(), *SAMPLING_FIELDS.split()}
    served = {*SglangBody.model_fields, *SglangSampling.model_fields}
    assert theirs - served == NEUTRAL | REFUSED.keys()
    assert served - theirs == {"weights", "return_support"}
    assert not NEUTRAL & REFUSED.keys()
    assert WITHOUT_EFFECT.keys() <= REFUSED.keys()


@pytest.mark.parametrize("in_sampling", [False, True])
async def test_neutral_fields_and_values_change_nothing(tmp_path: Path, in_sampling: bool) -> None:
    neutral = {
        **dict.fromkeys(NEUTRAL, 1),
        **{name: WITHOUT_EFFECT.get(name, False) for name in REFUSED},
        "unknown": None,
        "modalities": ["text"],
        "image_data": [None, []],
    }
    async with foreign(tmp_path) as served:
        plain = await submitted(served, BODY)
        found = await submitted(served, placed(neutral, in_sampling=in_sampling))
    assert found == plain


@pytest.mark.parametrize("in_sampling", [False, True])
async def test_field_that_would_change_the_answer_is_refused_by_name(
    tmp_path: Path, in_sampling: bool
) -> None:
    values = {**dict.fromkeys(REFUSED, "a"), "unknown": 0, "temprature": 0.5}
    more = [("logprob_start_len", 0), ("logprob_start_len", [-1, 0]), ("max_thinking_tokens", 0)]
    async with foreign(tmp_path) as served:
        for name, value in [*values.items(), *more]:
            body = placed({name: value}, in_sampling=in_sampling)
            status, problem = await served.refused("/generate", body)
            assert (status, problem["code"]) == (422, "invalid_request")
            [error] = problem["errors"]
            assert error["location"] == name
            assert error["message"] == REFUSED.get(name, error["message"])
        assert served.engine.submitted == []


async def test_sampling_parameters_reach_the_engine(tmp_path: Path) -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": -1,
        "min_p": 0.125,
        "n": 2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.5,
        "min_new_tokens": 2,
        "max_new_tokens": 4,
        "stop": "x",
        "stop_token_ids": [9],
        "logit_bias": {"3": 1.5},
        "ignore_eos": True,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "regex": "a+",
        "json_schema": "",
        "sampling_seed": 7,
    }
    async with foreign(tmp_path) as served:
        await served.post("/generate", placed(given, in_sampling=True))
        first, second = served.engine.submitted
    sampling = first.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 0)
    assert (sampling.min_p, sampling.presence_penalty) == (0.125, 0.5)
    assert (sampling.frequency_penalty, sampling.repetition_penalty) == (0.25, 1.5)
    assert (sampling.min_tokens, sampling.max_tokens) == (2, 4)
    assert (sampling.stop, sampling.stop_token_ids) == (("x",), (9,))
    assert dict(sampling.logit_bias) == {3: 1.5}
    assert (sampling.ignore_eos, sampling.skip_special_tokens) == (True, False)
    assert sampling.include_stop_str_in_output
    assert sampling.structured_outputs is not None and sampling.structured_outputs.regex == "a+"
    assert first.seed is not None and first.seed != second.seed


@pytest.mark.parametrize(
    ("constraint", "kind", "value"),
    [
        ({"json_schema": "$$ANY$$"}, "json_object", True),
        ({"json_schema": '{"type": "object"}'}, "json", '{"type": "object"}'),
        ({"ebnf": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
    ],
)
async def test_constraint_reaches_the_engine(
    tmp_path: Path, constraint: dict[str, Any], kind: str, value: object
) -> None:
    async with foreign(tmp_path) as served:
        await served.post("/generate", placed(constraint, in_sampling=True))
        [sample] = served.engine.submitted
        both = placed({**constraint, "regex": "a"}, in_sampling=True)
        _, problem = await served.refused("/generate", both)
    found = getattr(sample.sampling.structured_outputs, kind)
    assert (json.loads(found) if kind == "json" else found) == (
        json.loads(str(value)) if kind == "json" else value
    )
    assert problem["errors"][0]["location"] in ("regex", "ebnf")


async def test_samples_of_a_request_are_limited(tmp_path: Path) -> None:
    body = placed({"n": 1024}, in_sampling=True)
    async with foreign(tmp_path) as served:
        _, problem = await served.refused("/generate", {**body, "input_ids": [[5]] * 65})
    assert "66560 samples" in problem["detail"]


async def test_version_can_be_requested(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        early = {**BODY, "weights": {"min_version": "v9"}}
        status, problem = await served.refused("/generate", early)
        assert (status, problem["code"]) == (503, "version_unavailable")
        await served.post("/generate", {**BODY, "weights": {"exact_version": "v0"}})


async def test_events_are_cumulative(tmp_path: Path) -> None:
    params = {"max_new_tokens": 6}
    body = {"input_ids": list(range(64)), "sampling_params": params, "return_logprob": True}
    async with (
        foreign(tmp_path, engine=FakeEngine(instant=False)) as served,
        streaming(served, body) as events,
    ):
        served.engine.step(2)
        first = await anext(events)
        served.engine.step(9)
        [last] = [event async for event in events]
    assert (first["text"], first["output_ids"]) == ("@A", [64, 65])
    assert first["meta_info"]["finish_reason"] is None
    assert first["meta_info"]["weight_version"] == "v0" and "index" not in first
    assert (last["text"], last["output_ids"]) == (TEXT, [64, 65, 66, 67, 68, 69])
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 6}
    assert last["meta_info"]["output_token_logprobs"] == [
        [-0.5, token, None] for token in range(64, 70)
    ]


@pytest.mark.parametrize(("no_stop_trim", "held"), [(False, 2), (True, 0)])
async def test_beginning_of_a_stop_string_is_held_back(
    tmp_path: Path, no_stop_trim: bool, held: int
) -> None:
    params = {"max_new_tokens": 6, "stop": ["EFG"], "no_stop_trim": no_stop_trim}
    async with (
        foreign(tmp_path, engine=FakeEngine(instant=False)) as served,
        streaming(served, {"input_ids": list(range(64)), "sampling_params": params}) as events,
    ):
        served.engine.step(4)
        first = await anext(events)
        served.engine.step(9)
        [last] = [event async for event in events]
    assert first["text"] == TEXT[: 4 - held]
    assert last["text"] == TEXT


async def test_incomplete_character_is_held_back(tmp_path: Path) -> None:
    class Utf8Engine(FakeEngine):
        def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
            return ("aé".encode() * 3)[: len(token_ids)].decode(errors="replace")

    async with (
        foreign(tmp_path, engine=Utf8Engine(instant=False)) as served,
        streaming(served, BODY) as events,
    ):
        served.engine.step(2)
        assert (await anext(events))["text"] == "a"
        served.engine.step(1)
        assert (await anext(events))["text"] == "aé"
        served.engine.step(9)
        assert [event["text"] async for event in events] == ["aéa"]


async def test_tokens_of_several_steps_are_one_event(tmp_path: Path) -> None:
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 200}}
    async with (
        foreign(tmp_path, engine=FakeEngine(instant=False)) as served,
        streaming(served, body) as events,
    ):
        for _ in range(100):
            served.engine.step(1)
        assert len((await anext(events))["output_ids"]) == 100
        for _ in range(50):
            served.engine.step(1)
        assert len((await anext(events))["output_ids"]) == 150


async def test_stream_is_not_quadratic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token is an event at first; a long sample has one when it has grown by 1/32."""
    monkeypatch.setattr(sglang_generate, "MAX_QUIET_SECONDS", math.inf)
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 4000}}
    engine = FakeEngine(instant=False, max_context_tokens=8192)

    async def step() -> None:
        while engine.running:
            engine.step(1)
            await asyncio.sleep(0)

    async with foreign(tmp_path, engine) as served, streaming(served, body) as events:
        stepping = asyncio.create_task(step())
        sizes = [len(event["output_ids"]) async for event in events]
        await stepping
    assert sizes[-1] == 4000
    late = [size for size in sizes[:-1] if size > 256]
    assert all(size - before >= size / 32 for before, size in itertools.pairwise(late))


async def test_stream_sends_what_is_old_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_generate, "MAX_QUIET_SECONDS", 0.0)
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 400}}
    async with (
        foreign(tmp_path, engine=FakeEngine(instant=False)) as served,
        streaming(served, body) as events,
    ):
        for number in (300, 301):
            served.engine.step(300 if number == 300 else 1)
            assert len((await anext(events))["output_ids"]) == number


async def test_events_of_several_samples_have_an_index(tmp_path: Path) -> None:
    body = {"text": ["ab", "c"], "sampling_params": {"max_new_tokens": 3, "n": 2}}
    async with (
        foreign(tmp_path, engine=FakeEngine(instant=False)) as served,
        streaming(served, body, 4) as events,
    ):
        served.engine.step(3)
        found = {event["index"]: event["output_ids"] async for event in events}
    assert found == {0: [2, 3, 4], 1: [2, 3, 4], 2: [1, 2, 3], 3: [1, 2, 3]}


async def test_stream_can_be_aborted_by_its_id(tmp_path: Path) -> None:
    body = {"input_ids": [5], "rid": "mine", "sampling_params": {"max_new_tokens": 50}}
    async with (
        foreign(tmp_path, engine=FakeEngine(instant=False)) as served,
        streaming(served, body) as events,
    ):
        served.engine.step(2)
        await anext(events)
        await served.post("/abort_request", {"rid": "mine"})
        [last] = [event async for event in events]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["output_ids"] == [1, 2]


async def test_disconnected_stream_ends_its_samples(tmp_path: Path) -> None:
    async with foreign(tmp_path, engine=FakeEngine(instant=False)) as served:
        async with streaming(served, BODY) as events:
            served.engine.step(1)
            await anext(events)
        async with asyncio.timeout(30):
            while served.engine.running:
                await asyncio.sleep(0.001)


async def test_engine_that_dies_ends_the_stream_with_an_error(tmp_path: Path) -> None:
    async with (
        foreign(tmp_path, engine=FakeEngine(instant=False)) as served,
        streaming(served, BODY) as events,
    ):
        served.engine.step(1)
        await anext(events)
        served.engine.die()
        [last] = [event async for event in events if "error" in event]
    assert last["error"].keys() == {"message", "type", "param", "code"}

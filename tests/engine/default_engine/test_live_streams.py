"""Streams of the real engine: their parts give the answer without a stream."""

import json
from typing import Any

import httpx
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from tests.serving import Served

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="package")]

GREEDY = {"temperature": 0, "ignore_eos": True}
# Bytes of characters of two to four bytes, which the bundled tokenizer has no tokens for.
MULTI_BYTE = "Write: é中😀é中😀é中😀é中😀"


async def posted(served: Served, path: str, body: dict[str, Any]) -> httpx.Response:
    """Answer of a route that is not in the native contract, which `Served.http` checks."""
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer


async def choices_of(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await posted(served, path, {**body, "stream": True})
    return [
        json.loads(event.removeprefix("data: "))["choices"][0]
        for event in answer.content.decode().split("\n\n")
        if event and event != "data: [DONE]"
    ]


async def plain(served: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    [choice] = (await posted(served, path, body)).json()["choices"]
    return dict(choice)


@pytest.mark.parametrize("prompt", ["12+34=", MULTI_BYTE])
@pytest.mark.parametrize("bias", [None, {"195": 60, "169": 60, "128": 40}])
async def test_parts_of_a_completion_are_the_answer_without_a_stream(
    served: Served, prompt: str, bias: dict[str, float] | None
) -> None:
    """With a bias towards bytes that are parts of characters."""
    body = {
        "prompt": prompt,
        "max_tokens": 40,
        "logprobs": 2,
        "return_token_ids": True,
        "return_weight_versions": True,
        **GREEDY,
        "logit_bias": bias,
    }
    whole = await plain(served, "/v1/completions", body)
    parts = await choices_of(served, "/v1/completions", body)
    assert len(parts) > 3
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert [token for part in parts for token in part["token_ids"]] == whole["token_ids"]
    for name, values in whole["logprobs"].items():
        streamed = [value for part in parts for value in part["logprobs"][name]]
        if name == "token_logprobs":
            assert streamed == pytest.approx(values, abs=1e-4)
        elif name != "top_logprobs":
            assert streamed == values
    assert parts[-1]["weight_versions"] == whole["weight_versions"]


async def test_parts_of_a_chat_are_the_answer_without_a_stream(served: Served) -> None:
    messages = [{"role": "user", "content": "12+34"}]
    body = {"messages": messages, "max_tokens": 40, **GREEDY}
    whole = await plain(served, "/v1/chat/completions", body)
    parts = await choices_of(served, "/v1/chat/completions", body)
    assert len(parts) > 3
    text = "".join(part["delta"].get("content") or "" for part in parts)
    assert text == whole["message"]["content"]
    assert parts[-1]["finish_reason"] == whole["finish_reason"] == "length"


@pytest.mark.parametrize("include", [False, True])
async def test_stop_string_cuts_both_answers(served: Served, include: bool) -> None:
    body = {"prompt": "12+34=", "max_tokens": 40, **GREEDY}
    text = (await plain(served, "/v1/completions", body))["text"]
    stop = text[5:8]
    body |= {"stop": [stop], "include_stop_str_in_output": include}
    whole = await plain(served, "/v1/completions", body)
    end = text.find(stop)
    assert whole["text"] == text[: end + len(stop) if include else end]
    assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", stop)
    parts = await choices_of(served, "/v1/completions", body)
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert parts[-1]["stop_reason"] == stop


async def test_forced_call_is_parsed_from_text_that_its_constraint_allows(served: Served) -> None:
    properties = {"a": {"enum": [1, 2]}}
    parameters = {
        "type": "object",
        "properties": properties,
        "required": ["a"],
        "additionalProperties": False,
    }
    function = {"name": "add", "parameters": parameters, "strict": True}
    tool = {"type": "function", "function": function}
    messages = [{"role": "user", "content": "12+34"}]
    body = {"messages": messages, "tools": [tool], "max_tokens": 200, "temperature": 0}
    blanks = (await posted(served, "/tokenize", {"prompt": " \n\t\r"})).json()["tokens"]
    # The constraint allows any number of blanks, and a small model may write nothing else.
    body["logit_bias"] = {str(token): -100 for token in blanks}
    body["tool_choice"] = {"type": "function", "function": {"name": "add"}}
    whole = await plain(served, "/v1/chat/completions", body)
    [call] = whole["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["a"] in (1, 2)
    parts = await choices_of(served, "/v1/chat/completions", body)
    functions = [
        each["function"] for part in parts for each in part["delta"].get("tool_calls") or ()
    ]
    assert functions[0]["name"] == "add"
    arguments = "".join(each.get("arguments") or "" for each in functions)
    assert json.loads(arguments) == json.loads(call["function"]["arguments"])


async def test_native_tokens_are_those_of_the_samples(served: Served) -> None:
    body = {
        "groups": [{"prompt": {"text": "12+34="}, "n": 3}],
        "sampling": {"max_tokens": 40, "ignore_eos": True},
        "stream": True,
        "stream_tokens": True,
    }
    answer = await served.http.post("/v1/rollouts", json=body)
    records = [json.loads(line) for line in answer.text.split("\n") if line]
    samples = {r["sample"]["index"]: r["sample"] for r in records if r["type"] == "sample"}
    for index, sample in samples.items():
        parts = [r for r in records if r["type"] == "tokens" and r["index"] == index]
        assert len(parts) > 3
        for name in ("token_ids", "logprobs"):
            assert [value for part in parts for value in part[name]] == sample[name]


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.6, "top_k": 5, "presence_penalty": 0.5},
        {"structured_outputs": {"regex": "[0-9 ]{8}"}},
    ],
)
async def test_raw_and_given_logprobs_are_those_of_scoring(
    served: Served, sampling: dict[str, Any]
) -> None:
    """Of the model's own distribution, whatever was sampled; also next to supports."""
    prompt = {"text": "12+34="}
    body = {
        "groups": [{"prompt": prompt, "n": 3}],
        "sampling": {"max_tokens": 8, "ignore_eos": True, **sampling},
        "logprob_token_ids": [20, 5],
        "top_logprobs": 3,
        "logprobs_mode": "raw_logprobs",
        "return_support": True,
    }
    answer = (await posted(served, "/v1/rollouts", body)).json()
    for sample in answer["groups"][0]["samples"]:
        tokens = sample["token_ids"]
        item = {"prompt": prompt, "responses": [tokens]}
        given = {**item, "logprob_token_ids": [[[20, 5]] * len(tokens)]}
        scored = [
            (await posted(served, "/v1/score", wanted)).json()["items"][0]["responses"][0]
            for wanted in ({"items": [item], "top_logprobs": 3}, {"items": [given]})
        ]
        assert sample["raw_logprobs"] == pytest.approx(scored[0]["logprobs"], abs=1e-3)
        assert len(sample["support"]["lengths"]) == len(tokens)
        for name, of_score in zip(("top_logprobs", "given_logprobs"), scored, strict=True):
            found, expected = sample[name], of_score[name]
            assert found["offsets"] == expected["offsets"]
            assert found["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-3)
        if sampling:
            assert sample["logprobs"] != pytest.approx(sample["raw_logprobs"], abs=1e-3)


async def test_compat_options_of_prompts_on_the_real_engine(served: Served) -> None:
    """Truncation, echo and supports of streams and of whole answers are the same."""
    body = {"prompt": "Compute 12+34.", "max_tokens": 4, **GREEDY}
    body |= {"echo": True, "truncate_prompt_tokens": 3, "logprobs": 1, "return_support": True}
    whole = (await posted(served, "/v1/completions", body)).json()["choices"]
    streamed = await choices_of(served, "/v1/completions", body)
    for choice in whole:
        parts = [part for part in streamed if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert choice["text"].startswith("Compute 12+34.")
        assert len(choice["logprobs"]["tokens"]) == 7
        assert parts[-1]["support"] == choice["support"]


async def test_other_apis_sample_the_tokens_of_the_chat(served: Served) -> None:
    """The Messages and Responses APIs, with their own clients, whole and streamed."""
    messages: list[Any] = [{"role": "user", "content": "12+34"}]
    extra = {"temperature": 0}
    body = {"messages": messages, "max_tokens": 40, **extra}
    chat = await plain(served, "/v1/chat/completions", body)
    text = chat["message"]["content"]
    model = served.server.engine.info.model
    async with AsyncAnthropic(base_url=served.url, api_key="none") as claude:
        fields: Any = {"model": model, "messages": messages, "max_tokens": 40}
        whole: Any = await claude.messages.create(**fields, extra_body=extra)
        assert whole.content[0].text == text
        async with claude.messages.stream(**fields, extra_body=extra) as stream:
            texts = [part async for part in stream.text_stream]
        assert "".join(texts) == text
        counted = await claude.messages.count_tokens(model=model, messages=messages)
        assert counted.input_tokens == whole.usage.input_tokens
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as speaker:
        asked: Any = {"model": model, "input": "12+34", "max_output_tokens": 40}
        response: Any = await speaker.responses.create(**asked, extra_body=extra)
        assert response.output_text == text
        async with speaker.responses.stream(**asked, extra_body=extra) as running:
            deltas = [e.delta async for e in running if e.type == "response.output_text.delta"]
        assert "".join(deltas) == text

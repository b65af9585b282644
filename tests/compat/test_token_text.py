"""Text of tokens: in log-probabilities, echoed prompts, and tokenizer routes."""

from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.adapters import saved_adapter
from tests.compat.test_token_streams import events_of, stepping
from tests.compat.third_party import foreign
from tests.fake_engine import FakeEngine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


async def test_completion_logprobs_contain_token_texts(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        body = {"prompt": [9] * 65, "max_tokens": 2, "logprobs": 1}
        logprobs = (await served.post(COMPLETIONS, body))["choices"][0]["logprobs"]
        streamed = (await served.http.post(COMPLETIONS, json={**body, "stream": True})).text
    assert logprobs == {
        "tokens": ["A", "B"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"A": -0.5}, {"B": -0.5}],
        "text_offset": [0, 1],
    }
    assert '"tokens":["A","B"]' in streamed


async def test_chat_logprobs_contain_token_texts_and_bytes(tmp_path: Path) -> None:
    talk: dict[str, Any] = {"messages": [{"role": "user", "content": "a" * 65}], "max_tokens": 1}
    async with foreign(tmp_path) as served:
        body = {**talk, "logprobs": True, "top_logprobs": 2}
        [named] = (await served.post(CHAT, body))["choices"][0]["logprobs"]["content"]
        by_id = {**body, "return_tokens_as_token_ids": True}
        [numbered] = (await served.post(CHAT, by_id))["choices"][0]["logprobs"]["content"]
    assert named == {
        "token": "A",
        "token_id": 65,
        "logprob": -0.5,
        "bytes": [65],
        "top_logprobs": [
            {"token": "A", "token_id": 65, "logprob": -0.5, "bytes": [65]},
            {"token": "B", "token_id": 66, "logprob": -1.5, "bytes": [66]},
        ],
    }
    assert (numbered["token"], numbered["bytes"]) == ("token_id:65", list(b"token_id:65"))


async def test_tokens_with_equal_text_keep_the_highest_probability(tmp_path: Path) -> None:
    """All parts of multi-byte characters decode to the replacement character."""

    class Bytes(FakeEngine):
        def token_texts(self, token_ids: Any) -> list[str]:
            return ["\ufffd" for _ in token_ids]

    async with foreign(tmp_path, Bytes()) as served:
        body = {"prompt": [9], "max_tokens": 1, "logprobs": 3}
        [choice] = (await served.post(COMPLETIONS, body))["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"\ufffd": -0.5}]


async def test_every_token_is_decoded_once(tmp_path: Path) -> None:
    class Counting(FakeEngine):
        decoded: list[int] = []

        def token_texts(self, token_ids: Any) -> list[str]:
            self.decoded += token_ids
            return super().token_texts(token_ids)

    engine = Counting()
    async with foreign(tmp_path, engine) as served:
        for _ in range(2):
            await served.post(COMPLETIONS, {"prompt": [9], "n": 8, "max_tokens": 5, "logprobs": 2})
    assert sorted(engine.decoded) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_lm_eval_log_likelihoods(tmp_path: Path, max_tokens: int) -> None:
    """It sums token_logprobs[context:-1] and compares each with the highest at its position."""
    prompts = [[70, 71, 72], [80, 81]]
    async with foreign(tmp_path) as served:
        body = {"prompt": prompts, "max_tokens": max_tokens, "echo": True, "logprobs": 1}
        answer = await served.post(COMPLETIONS, {**body, "temperature": 0, "seed": 1234})
    first, second = answer["choices"]
    sampled = ["\x03"] * max_tokens
    assert first["text"] == "".join(["F", "G", "H", *sampled])
    assert first["logprobs"] == {
        "tokens": ["F", "G", "H", *sampled],
        "token_logprobs": [None, -1.0, -2.0, *[-0.5] * max_tokens],
        "top_logprobs": [None, {"G": -1.0}, {"H": -2.0}, *[{"\x03": -0.5}] * max_tokens],
        "text_offset": [0, 1, 2, *[3] * max_tokens],
    }
    assert second["logprobs"]["tokens"] == ["P", "Q", *["\x02"] * max_tokens]
    assert (first["prompt_logprobs"], first["finish_reason"]) == (None, "length")
    assert len(first["weight_versions"]) == max_tokens


async def test_text_is_echoed_as_it_was_sent(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        body = {"prompt": ["ab", "cde"], "max_tokens": 1, "echo": True}
        answer = await served.post(COMPLETIONS, body)
    assert [choice["text"] for choice in answer["choices"]] == ["ab\x02", "cde\x03"]
    assert answer["choices"][0]["logprobs"] is None
    assert served.engine.scored == 0


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"prompt": [1] * 400, "echo": True, "n": 1024, "logprobs": 2}, "prompt_logprobs"),
        ({"prompt": [[1] * 400] * 3, "echo": True, "n": 1000}, "echo"),
        ({"echo": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_unsupported_echo_is_refused(
    tmp_path: Path, fields: dict[str, Any], name: str
) -> None:
    async with foreign(tmp_path) as served:
        status, problem = await served.refused(COMPLETIONS, {"prompt": [1], **fields})
    assert (status, problem["errors"][0]["location"]) == (400, name)
    assert served.engine.submitted == []


async def test_every_choice_echoes_its_prompt(tmp_path: Path) -> None:
    body = {"prompt": ["ab", "cde"], "max_tokens": 1, "echo": True, "n": 2, "logprobs": 1}
    async with foreign(tmp_path) as served:
        choices = (await served.post(COMPLETIONS, body))["choices"]
    assert [choice["text"] for choice in choices] == ["ab\x02"] * 2 + ["cde\x03"] * 2
    assert {choice["logprobs"]["tokens"][0] for choice in choices} == {"a", "c"}
    assert served.engine.scored == 2


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("logprobs", [None, 0, 1])
async def test_streamed_echo_is_the_whole_one(
    tmp_path: Path, max_tokens: int, logprobs: int | None
) -> None:
    body = {"prompt": ["ab", "cde"], "max_tokens": max_tokens, "echo": True, "n": 2}
    body |= {"logprobs": logprobs}
    async with foreign(tmp_path) as served:
        whole = (await served.post(COMPLETIONS, body))["choices"]
    engine = FakeEngine(instant=False)
    async with foreign(tmp_path, engine) as served, stepping(engine):
        answer = await served.http.post(COMPLETIONS, json={**body, "stream": True})
        streamed = [event["choices"][0] async for event in events_of(answer)]
    for choice in whole:
        parts = [part for part in streamed if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == "length"
        if logprobs is None:
            assert all(part["logprobs"] is None for part in parts)
            continue
        for name, values in choice["logprobs"].items():
            assert [value for part in parts for value in part["logprobs"][name]] == values


async def test_texts_and_chats_are_tokenized(tmp_path: Path) -> None:
    async with foreign(tmp_path, FakeEngine(max_context_tokens=8)) as served:
        text = await served.post("/tokenize", {"prompt": "ab", "model": "fake"})
        empty = await served.post("/tokenize", {"prompt": "", "add_special_tokens": False})
        named = await served.post("/tokenize", {"prompt": "ab", "return_token_strs": True})
        longer = await served.post("/tokenize", {"prompt": "a" * 20})
        messages = [{"role": "user", "content": "abc"}]
        chat = await served.post("/tokenize", {"messages": messages, "add_generation_prompt": True})
        back = await served.post("/detokenize", {"tokens": [97, 98]})
    assert text == {"count": 2, "max_model_len": 8, "tokens": [97, 98], "token_strs": None}
    assert (empty["tokens"], longer["count"], chat["tokens"]) == ([], 20, [97, 98, 99])
    assert named["token_strs"] == ["<97>", "<98>"]
    assert back == {"prompt": "ab"}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 400),
        ("/tokenize", {"prompt": "a", "model": "gpt"}, 404),
        ("/tokenize", {"prompt": "a" * 2**20}, 413),
        ("/tokenize", {"messages": [{"role": "wizard", "content": "a"}]}, 400),
        ("/tokenize", {"messages": [{"role": "user"}], "chat_template": "{{ 1 }}"}, 400),
        ("/tokenize", {"messages": [{"role": "user"}], "add_special_tokens": True}, 400),
        ("/detokenize", {}, 400),
        ("/detokenize", {"tokens": [256]}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": [1] * 513}, 400),
    ],
)
async def test_invalid_tokenize_request_is_refused(
    tmp_path: Path, path: str, body: dict[str, Any], status: int
) -> None:
    async with foreign(tmp_path) as served:
        assert (await served.refused(path, body))[0] == status


async def test_model_is_found_by_its_name(tmp_path: Path) -> None:
    engine = FakeEngine(max_adapters=1, model_given="/secret/place")
    sources = {"source_directories": [tmp_path / "out"]}
    async with foreign(tmp_path, engine, weights=sources) as served:
        path = str(saved_adapter(tmp_path / "out" / "a"))
        await served.post("/load_lora_adapter", {"lora_name": "policy", "lora_path": path})
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as speaker:
            assert (await speaker.models.retrieve("fake")).id == "fake"
            assert (await speaker.models.retrieve("policy")).id == "policy"
            assert (await speaker.models.retrieve("/secret/place")).id == "fake"
            with pytest.raises(openai.NotFoundError, match="no model of this name"):
                await speaker.models.retrieve("org/other")


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("/collective_rpc", "PUT /v1/weights"),
        ("/skyrl/v1/generate", "/inference/v1/generate"),
        ("/skyrl/v1/sample/more", "/inference/v1/generate"),
        ("/v1/embeddings", "embedding server"),
    ],
)
async def test_unsupported_routes_name_their_alternative(
    tmp_path: Path, path: str, instead: str
) -> None:
    async with foreign(tmp_path) as served:
        _, problem = await served.refused(path, {"input": "a"})
    assert problem["code"] == "unsupported"
    assert instead in problem["error"]["message"]

"""Truncated prompts, echoed messages and supports on the routes of other servers."""

from pathlib import Path
from typing import Any

import pytest

from tests.compat.test_token_streams import events_of
from tests.compat.third_party import Foreign, foreign

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ABCDEF = [*b"abcdef"]
USER = {"role": "user", "content": "abcdef"}
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "abcdef", "max_tokens": 2},
    CHAT: {"messages": [USER], "max_tokens": 2},
}
SUPPORTS: dict[str, dict[str, Any]] = {
    **BODIES,
    "/inference/v1/generate": {"token_ids": ABCDEF, "sampling_params": {"max_tokens": 2}},
    "/generate": {"input_ids": ABCDEF, "sampling_params": {"max_new_tokens": 2}},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 2}, b"ef"),
        ({"truncate_prompt_tokens": 2, "truncation_side": "left"}, b"ef"),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, b"ab"),
        ({"truncate_prompt_tokens": 100, "truncation_side": "right"}, b"abcdef"),
        ({"truncate_prompt_tokens": -1}, b"abcdef"),
        ({"truncation_side": "right"}, b"abcdef"),
    ],
)
async def test_prompt_is_truncated(
    tmp_path: Path, path: str, fields: dict[str, Any], kept: bytes
) -> None:
    async with foreign(tmp_path) as served:
        answer = await served.post(path, {**BODIES[path], **fields})
    [sample] = served.engine.submitted
    assert bytes(sample.prompt_token_ids) == kept
    assert answer["usage"]["prompt_tokens"] == len(kept)


@pytest.mark.parametrize("path", BODIES)
async def test_prompt_is_truncated_to_what_fits_the_context(tmp_path: Path, path: str) -> None:
    text = "ab" * 200 + "c" * 200
    long = {"prompt": [*text.encode()]} if path == COMPLETIONS else {}
    long = long or {"messages": [{"role": "user", "content": text}]}
    async with foreign(tmp_path) as served:
        body = {**BODIES[path], **long, "max_tokens": 1}
        await served.refused(path, body)
        await served.post(path, {**body, "truncate_prompt_tokens": -1})
    [sample] = served.engine.submitted
    assert bytes(sample.prompt_token_ids) == text.encode()[-511:]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("number", [0, 513, -2])
async def test_unusable_limit_of_a_prompt_is_refused(
    tmp_path: Path, path: str, number: int
) -> None:
    async with foreign(tmp_path) as served:
        body = {**BODIES[path], "truncate_prompt_tokens": number}
        status, problem = await served.refused(path, body)
    assert (status, problem["code"]) == (400, "invalid_request")
    assert "truncate_prompt_tokens" in problem["errors"][0]["location"]


async def test_echo_of_a_truncated_prompt_is_what_the_model_reads(tmp_path: Path) -> None:
    body = {**BODIES[COMPLETIONS], "truncate_prompt_tokens": 3, "echo": True, "max_tokens": 0}
    async with foreign(tmp_path) as served:
        [choice] = (await served.post(COMPLETIONS, body))["choices"]
    assert choice["text"] == "def"


async def streamed(served: Foreign, path: str, body: dict[str, Any]) -> list[Any]:
    answer = await served.http.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    return [event async for event in events_of(answer)]


async def test_chat_echoes_the_last_message_of_the_assistant(tmp_path: Path) -> None:
    last = {"role": "assistant", "content": [{"type": "text", "text": "Hi"}]}
    body = {**BODIES[CHAT], "messages": [USER, last], "echo": True, "n": 2}
    async with foreign(tmp_path) as served:
        choices = (await served.post(CHAT, body))["choices"]
        chunks = [event["choices"][0] for event in await streamed(served, CHAT, body)]
        [plain] = (await served.post(CHAT, {**BODIES[CHAT], "echo": True}))["choices"]
    assert [choice["message"]["content"] for choice in choices] == ["Hi\x08\x09"] * 2
    for index in range(2):
        deltas = [chunk["delta"] for chunk in chunks if chunk["index"] == index]
        assert deltas[:2] == [{"role": "assistant", "content": ""}, {"content": "Hi"}]
        assert "".join(delta.get("content", "") for delta in deltas) == "Hi\x08\x09"
    assert plain["message"]["content"] == "\x06\x07"


def _choices(path: str, answer: Any) -> Any:
    return [answer["meta_info"]] if path == "/generate" else answer["choices"]


@pytest.mark.parametrize("path", SUPPORTS)
async def test_supports_are_those_of_the_native_answer(tmp_path: Path, path: str) -> None:
    native = {"groups": [{"prompt": {"token_ids": ABCDEF}}], "sampling": {"max_tokens": 2}}
    body = {**SUPPORTS[path], "return_support": True}
    async with foreign(tmp_path) as served:
        answer = await served.post("/v1/rollouts", {**native, "return_support": True})
        expected = answer["groups"][0]["samples"][0]["support"]
        [choice] = _choices(path, await served.post(path, body))
        chunks = [_choices(path, chunk)[0] for chunk in await streamed(served, path, body)]
        [plain] = _choices(path, await served.post(path, SUPPORTS[path]))
    assert choice["support"] == expected and len(expected["lengths"]) == 2
    assert [chunk["support"] for chunk in chunks if "support" in chunk] == [expected]
    assert chunks[-1]["support"] == expected
    assert "support" not in plain


async def test_support_of_an_echo_without_tokens_is_absent(tmp_path: Path) -> None:
    body = {**BODIES[COMPLETIONS], "max_tokens": 0, "echo": True, "return_support": True}
    async with foreign(tmp_path) as served:
        [choice] = (await served.post(COMPLETIONS, body))["choices"]
    assert "support" not in choice

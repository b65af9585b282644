"""Log-probabilities of prompts and top-k logprobs, in the format of every client."""

from pathlib import Path
from typing import Any

import pytest

from service.compat import event_stream, logprobs
from service.compat.sglang import generate as sglang_generate
from service.compat.vllm import tokens as vllm_tokens
from tests.adapters import saved_adapter
from tests.compat.test_agent_apis import watched
from tests.compat.third_party import Foreign, foreign, wrong_status
from tests.fake_engine import FakeEngine

pytestmark = pytest.mark.slow

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
ASKED: dict[str, Any] = {"prompt": [7, 8], "max_tokens": 2}
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 2}


def of_tokens(*sampling: tuple[str, int]) -> dict[str, Any]:
    return {"token_ids": [7, 8], "sampling_params": {"max_tokens": 2, **dict(sampling)}}


async def test_completion_returns_top_logprobs_of_every_token(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        asked = {**ASKED, "logprobs": 2, "n": 2, "return_tokens_as_token_ids": True}
        for choice in (await served.post(COMPLETIONS, asked))["choices"]:
            told = choice["logprobs"]
            assert told["tokens"] == ["token_id:2", "token_id:3"]
            assert told["top_logprobs"] == [
                {"token_id:2": -0.5, "token_id:3": -1.5},
                {"token_id:3": -0.5, "token_id:4": -1.5},
            ]
        plain = await served.post(COMPLETIONS, {**ASKED, "logprobs": 0})
        assert plain["choices"][0]["logprobs"]["top_logprobs"] == [None, None]
    assert [request.num_top_logprobs for request in served.engine.submitted] == [2, 2, 0]


async def test_prompt_logprobs_are_computed_once(tmp_path: Path) -> None:
    """Once per group, in separate requests, so that samples still hit the prefix cache."""
    async with foreign(tmp_path) as served:
        asked = {"prompt": [[7, 8], [9, 8, 7]], "max_tokens": 2, "prompt_logprobs": 1, "n": 3}
        choices = (await served.post(COMPLETIONS, asked))["choices"]
    assert served.engine.scored == 2
    assert [choice["prompt_logprobs"] for choice in choices[:3]] == [
        [None, {"8": {"logprob": -1.0, "rank": 1}}]
    ] * 3
    assert choices[5]["prompt_logprobs"][1:] == [
        {"8": {"logprob": -1.0, "rank": 1}},
        {"7": {"logprob": -2.0, "rank": 1}},
    ]


async def test_prompt_logprobs_repeated_in_too_many_choices_are_refused(
    tmp_path: Path,
) -> None:
    async with foreign(tmp_path) as served:
        body = {"prompt": [7] * 60, "max_tokens": 1, "prompt_logprobs": 20, "n": 1024}
        status, problem = await served.refused(COMPLETIONS, body)
        assert (status, problem["errors"][0]["location"]) == (400, "prompt_logprobs")
        assert "1290240 logprobs" in problem["errors"][0]["message"]
        assert served.engine.scored == 0 and not served.engine.submitted
        await served.post(COMPLETIONS, {**body, "n": 1})


async def test_prompt_is_scored_under_the_requested_adapter(tmp_path: Path) -> None:
    engine = FakeEngine(max_adapters=1)
    sources = {"source_directories": [tmp_path / "out"]}
    async with foreign(tmp_path, engine, weights=sources) as served:
        path = str(saved_adapter(tmp_path / "out" / "a"))
        await served.post("/load_lora_adapter", {"lora_name": "policy", "lora_path": path})
        asked = {**ASKED, "model": "policy", "prompt_logprobs": 0}
        await served.post(COMPLETIONS, asked)
        served.server.adapters.check()
    assert engine.scored_under == ["policy@update-1"]


async def test_chat_lists_the_top_logprobs(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        by_id = {"return_tokens_as_token_ids": True}
        asked = {**TALK, "logprobs": True, "top_logprobs": 2, **by_id}
        content = (await served.post(CHAT, asked))["choices"][0]["logprobs"]["content"]
        assert [other["token"] for other in content[0]["top_logprobs"]] == [
            "token_id:2",
            "token_id:3",
        ]
        unasked = await served.post(CHAT, {**TALK, "top_logprobs": 2})
        assert unasked["choices"][0]["logprobs"] is None


async def test_vllm_generate_returns_only_the_sampled_token_at_one(tmp_path: Path) -> None:
    """renderers sends 1, and checks that each token has exactly one."""
    async with foreign(tmp_path) as served:
        for count, listed in ((0, 0), (1, 0), (2, 2)):
            answer = await served.post(GENERATE, of_tokens(("logprobs", count)))
            content = answer["choices"][0]["logprobs"]["content"]
            assert [len(entry["top_logprobs"]) for entry in content] == [listed] * 2
        scored = await served.post(GENERATE, of_tokens(("prompt_logprobs", 2)))
        assert scored["prompt_logprobs"] == [
            None,
            {"8": {"logprob": -1.0, "rank": 1}, "9": {"logprob": -2.0, "rank": 2}},
        ]


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (COMPLETIONS, {**ASKED, "logprobs": 21}, "logprobs"),
        (COMPLETIONS, {**ASKED, "prompt_logprobs": 21}, "prompt_logprobs"),
        (CHAT, {**TALK, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (GENERATE, of_tokens(("logprobs", 21)), "logprobs"),
        (COMPLETIONS, {**ASKED, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
)
async def test_too_many_logprobs_are_refused_before_anything_starts(
    tmp_path: Path, path: str, body: dict[str, Any], name: str
) -> None:
    async with foreign(tmp_path) as served:
        status, problem = await served.refused(path, body)
    assert (status, problem["errors"][0]["location"]) == (wrong_status(path), name)
    assert served.engine.submitted == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {**ASKED, "logprobs": 20}),
        (CHAT, {**TALK, "logprobs": True, "top_logprobs": 20}),
    ],
)
async def test_total_of_the_logprobs_is_limited(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    async with foreign(tmp_path, FakeEngine(max_context_tokens=2048)) as served:
        status, problem = await served.refused(path, {**body, "n": 1024, "max_tokens": 1000})
    assert (status, problem["errors"][0]["location"]) == (wrong_status(path), "top_logprobs")
    assert "1024000 positions" in problem["errors"][0]["message"]
    assert served.engine.submitted == []


async def test_stream_contains_logprobs(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        asked = {**ASKED, "logprobs": 1, "stream": True, "return_tokens_as_token_ids": True}
        answer = await _streamed(served, asked)
    assert '"top_logprobs":[{"token_id:2":-0.5},{"token_id:3":-0.5}]' in answer


async def _streamed(served: Foreign, asked: dict[str, Any]) -> str:
    return (await served.http.post(COMPLETIONS, json=asked)).text


BUILDERS = {
    COMPLETIONS: (logprobs, "completion_logprobs", {**ASKED, "max_tokens": 20, "logprobs": 20}),
    CHAT: (
        logprobs,
        "chat_logprobs",
        {**TALK, "max_tokens": 20, "logprobs": True, "top_logprobs": 20},
    ),
    GENERATE: (vllm_tokens, "_content", of_tokens(("logprobs", 20), ("max_tokens", 20))),
    "/v1/responses": (
        logprobs,
        "chat_logprobs",
        {
            "input": "abc",
            "max_output_tokens": 20,
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 20,
        },
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BUILDERS)
async def test_many_logprobs_are_built_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    module, name, body = BUILDERS[path]
    on_loop = watched(monkeypatch, module, name)
    async with foreign(tmp_path) as served:
        answer = await served.http.post(path, json={**body, "stream": stream})
    assert answer.status_code == 200
    assert on_loop == [False]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE, "/generate"])
async def test_supports_are_encoded_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    bodies = {
        COMPLETIONS: ASKED,
        CHAT: TALK,
        GENERATE: of_tokens(),
        "/generate": {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}},
    }
    on_loop = watched(
        monkeypatch, sglang_generate if path == "/generate" else event_stream, "sse_event"
    )
    async with foreign(tmp_path) as served:
        body = {**bodies[path], "stream": True, "return_support": True}
        answer = await served.http.post(path, json=body)
    assert '"support"' in answer.text
    assert on_loop and not on_loop[-1]

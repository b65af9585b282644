"""Limits of logprobs on the routes of other servers, and how those of prompts are computed."""

from pathlib import Path
from typing import Any

import pytest

from tests.adapters import saved_adapter
from tests.compat.third_party import foreign
from tests.compat.wires import CHAT, COMPLETIONS, message_of
from tests.fake_engine import FakeEngine

pytestmark = pytest.mark.slow

ASKED: dict[str, Any] = {"prompt": [7, 8], "max_tokens": 2}
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 2}


async def test_prompt_logprobs_are_computed_once(tmp_path: Path) -> None:
    """Once per group, in separate requests, so that samples still hit the prefix cache."""
    async with foreign(tmp_path) as served:
        asked = {"prompt": [[7, 8], [9, 8, 7]], "max_tokens": 2, "prompt_logprobs": 1, "n": 3}
        choices = (await served.post(COMPLETIONS, asked))["choices"]
    assert served.engine.scored == 2
    logprobs = [
        [row and {token: entry["logprob"] for token, entry in row.items()} for row in rows]
        for rows in (choice["prompt_logprobs"] for choice in choices)
    ]
    assert logprobs == [[None, {"8": -1.0}]] * 3 + [[None, {"8": -1.0}, {"7": -2.0}]] * 3


async def test_prompt_logprobs_repeated_in_too_many_choices_are_refused(
    tmp_path: Path,
) -> None:
    async with foreign(tmp_path) as served:
        body = {"prompt": [7] * 60, "max_tokens": 1, "prompt_logprobs": 20, "n": 1024}
        several = {**body, "prompt": [[7] * 60] * 9, "n": 128}
        echoed = {"prompt": [[7] * 500] * 3, "max_tokens": 1, "echo": True, "n": 1000}
        for large in (body, several, echoed):
            answer = await served.http.post(COMPLETIONS, json=large)
            assert (answer.status_code, "of prompts over all" in message_of(answer)) == (400, True)
        assert not served.engine.running
        served.engine.submitted.clear()
        assert served.engine.scored == 0
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
    assert (status, problem["errors"][0]["location"]) == (400, "top_logprobs")
    assert "1024000 positions" in problem["errors"][0]["message"]
    assert served.engine.submitted == []

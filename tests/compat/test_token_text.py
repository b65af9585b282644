"""Echoed prompts, tokenizer routes, the model by its name, and routes that are not served."""

from pathlib import Path
from typing import Any

import pytest

from tests.compat.third_party import foreign
from tests.compat.wires import ASKED, COMPLETIONS, ends, events_of


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_lm_eval_log_likelihoods(tmp_path: Path, max_tokens: int, stream: bool) -> None:
    """It sums token_logprobs[context:-1] and compares each with the highest at its position."""
    body = {
        "prompt": [[70, 71, 72], [80, 81]],
        "max_tokens": max_tokens,
        "echo": True,
        "logprobs": 1,
        "temperature": 0,
        "seed": 1234,
        "stream": stream,
        "return_support": True,
        "return_weight_versions": True,
    }
    async with foreign(tmp_path) as served:
        answer = await served.http.post(COMPLETIONS, json=body)
        assert answer.status_code == 200, answer.text
        scored = served.engine.scored
    found = ends(COMPLETIONS, events_of(answer.text)) if stream else answer.json()["choices"]
    first, second = found
    sampled = ["\x03"] * max_tokens
    assert (first["text"], scored) == ("".join(["F", "G", "H", *sampled]), 2)
    logprobs = first["logprobs"]
    assert logprobs["tokens"] == ["F", "G", "H", *sampled]
    assert logprobs["token_logprobs"] == [None, -1.0, -2.0, *[-0.5] * max_tokens]
    assert logprobs["top_logprobs"][1:3] == [{"G": -1.0}, {"H": -2.0}]
    assert second["logprobs"]["tokens"] == ["P", "Q", *["\x02"] * max_tokens]
    assert first["finish_reason"] == "length" and first["weight_versions"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "a", "model": "gpt"}, 404),
        ("/tokenize", {"prompt": "a" * 2**20}, 413),
        ("/tokenize", {"messages": [{"role": "wizard", "content": "a"}]}, 400),
        ("/tokenize", {"messages": ASKED, "chat_template": "{{ 1 }}"}, 400),
        ("/detokenize", {}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": [1] * 2**19}, 413),
    ],
)
async def test_invalid_tokenize_request_is_refused(
    tmp_path: Path, path: str, body: dict[str, Any], status: int
) -> None:
    async with foreign(tmp_path) as served:
        assert (await served.http.post(path, json=body)).status_code == status


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("/collective_rpc", "PUT /v1/weights"),
    ],
)
async def test_unsupported_routes_name_their_alternative(
    tmp_path: Path, path: str, instead: str
) -> None:
    async with foreign(tmp_path) as served:
        _, problem = await served.refused(path, {"input": "a"})
    assert problem["code"] == "unsupported"
    assert instead in problem["error"]["message"]

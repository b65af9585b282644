"""Constraints of chats begin after the reasoning, on the real engine, as in vLLM.

A bias makes the model end its reasoning at once.
"""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from engine.vllm_engine import VllmEngine
from tests.engine.chats import write_tokenizer
from tests.engine.seedling import settings
from tests.serving import Served, serving

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

TEMPLATE = (
    "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<think>{% endif %}"
    "{% if enable_thinking is false %}</think>{% endif %}"
)
CHOICES = ["yes", "no"]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": CHOICES}},
    "required": ["a"],
    "additionalProperties": False,
}
WITHOUT_SPACES = {
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model with further tokens for the marks of reasoning and tool calls."""
    model = write_tokenizer(tmp_path_factory.mktemp("reasoning") / "model", TEMPLATE)
    config = json.loads((model / "config.json").read_text())
    tensors = load_file(model / "model.safetensors")
    rows = tensors["model.embed_tokens.weight"]
    config["vocab_size"] = len(AutoTokenizer.from_pretrained(model))
    tensors["model.embed_tokens.weight"] = torch.cat(
        [rows, rows[: config["vocab_size"] - len(rows)].clone()]
    )
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    (model / "config.json").write_text(json.dumps(config))
    return model


@pytest.fixture(scope="module")
def end_of_reasoning(model: Path) -> int:
    [token] = AutoTokenizer.from_pretrained(model).encode("</think>")
    return int(token)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    parsers = {"tool_parser": "hermes", "reasoning_parser": "qwen3"}
    engine = VllmEngine(settings(model, vllm_args=WITHOUT_SPACES, **parsers))
    async with serving(engine, tmp_path_factory.mktemp("served")) as served:
        yield served


async def answered(served: Served, route: str, end: int, **fields: Any) -> Any:
    """The answer of a chat whose model ends its reasoning at once, and would do so for ever."""
    body = {"max_tokens": 40, "seed": 3, "logit_bias": {str(end): 100}, **fields}
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as http:  # not in the contract
        answer = await http.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


MESSAGES = [{"role": "user", "content": "Compute 1+2."}]


async def chat(served: Served, end: int, **fields: Any) -> Any:
    answer = await answered(served, "/v1/chat/completions", end, messages=MESSAGES, **fields)
    return answer["choices"][0]


@pytest.mark.parametrize(
    "constraint",
    [
        {"structured_outputs": {"choice": CHOICES}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": SCHEMA},
            }
        },
    ],
)
async def test_chat_is_constrained_after_its_reasoning(
    served: Served, end_of_reasoning: int, constraint: dict[str, Any]
) -> None:
    choice = await chat(served, end_of_reasoning, max_tokens=400, **constraint)
    content = choice["message"]["content"]
    assert choice["finish_reason"] == "stop"
    assert content in CHOICES or json.loads(content)["a"] in CHOICES


async def test_chat_whose_prompt_ends_the_reasoning_is_constrained_from_the_first_token(
    served: Served,
) -> None:
    fields = {
        "structured_outputs": {"choice": CHOICES},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert (await chat(served, 5, **fields))["message"]["content"] in CHOICES


async def test_responses_and_messages_are_constrained_after_their_reasoning(
    served: Served, end_of_reasoning: int
) -> None:
    """Messages have no bias: their prompt ends the reasoning."""
    format = {"type": "json_schema", "name": "s", "schema": SCHEMA}
    fields: dict[str, Any] = {"input": "Compute.", "text": {"format": format}}
    answer = await answered(
        served, "/v1/responses", end_of_reasoning, **fields, max_output_tokens=400, max_tokens=None
    )
    [text] = [item["content"][0]["text"] for item in answer["output"] if item["type"] == "message"]
    assert json.loads(text)["a"] in CHOICES
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    fields = {"messages": MESSAGES, "output_config": config, "thinking": {"type": "disabled"}}
    answer = await answered(
        served, "/v1/messages", end_of_reasoning, **fields, model="model", max_tokens=400
    )
    [text] = [block["text"] for block in answer["content"] if block["type"] == "text"]
    assert json.loads(text)["a"] in CHOICES


@pytest.mark.parametrize("length", [1, 2, 4])
async def test_continued_sample_is_constrained_after_its_reasoning(
    served: Served, end_of_reasoning: int, length: int
) -> None:
    """Cut by `max_tokens` in the reasoning, at its end and in the constrained text."""
    engine: Any = served.server.engine
    sampling = {
        "structured_outputs": {"regex": "[0-9]{9}", "enable_in_reasoning": False},
        "logit_bias": {str(end_of_reasoning): 100},
        "max_tokens": 40,
    }
    prompt = engine.llm.get_tokenizer().encode("<think>")
    groups = [{"prompt": {"token_ids": prompt}}]
    asked = {"groups": groups, "sampling": {**sampling, "max_tokens": length}}
    [cut] = (await served.http.post("/v1/rollouts", json=asked)).json()["groups"]
    names = ("token_ids", "logprobs", "versions")
    given = [{"group": 0, **{name: cut["samples"][0][name] for name in names}}]
    asked = {"groups": groups, "sampling": sampling, "continue_from": {"samples": given}}
    answer = await served.http.post("/v1/rollouts", json=asked)
    assert answer.status_code == 200, answer.text
    [sample] = answer.json()["groups"][0]["samples"]
    assert sample["token_ids"][:length] == cut["samples"][0]["token_ids"]
    assert sample["token_ids"][0] == end_of_reasoning
    assert re.fullmatch("[0-9]{9}", engine.decode(sample["token_ids"][1:]))

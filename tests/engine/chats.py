"""A `ChatProcessor` with the shipped tokenizer and a test template. It starts no engine."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.renderers.registry import renderer_from_config

from engine.requests.chat_conversion import ChatProcessor
from engine.settings import EngineSettings
from engine.types.chat import ChatRequest, ChatResponse
from tests.engine.seedling import MODEL

CONTEXT_TOKENS = 512
TEMPLATE = """\
{%- for tool in tools or [] %}tool {{ tool.function.name }}
{% endfor %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{%- for call in message.tool_calls or [] %}
 {{ call.function.name }}({{ call.function.arguments | tojson }})
{%- endfor %}
{% endfor %}
{%- if documents %}{{ documents | length }} documents{% endif %}
{%- if enable_thinking %}thinking{% endif %}
{%- for i in range(repeat or 0) %}x{% endfor %}"""


@dataclass(frozen=True)
class TemplateChat:
    chat: ChatProcessor
    tokenizer: Any

    def encode(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), **options: Any
    ) -> list[int]:
        asked = ChatRequest(messages=messages, tools=tools, template_options=options)
        return self.chat.encode(asked)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), **options: Any
    ) -> str:
        return str(self.tokenizer.decode(self.encode(messages, tools, **options)))

    def chat_response(self, text: str, conversation: ChatRequest) -> ChatResponse:
        return self.chat.chat_response(self.tokenizer.encode(text), conversation)


def make_chat(
    directory: Path, template: str | dict[str, str] = TEMPLATE, **parsers: str
) -> TemplateChat:
    """A chat processor. `parsers` are the settings `tool_parser` and `reasoning_parser`."""
    model = write_tokenizer(directory / "model", template)
    config: Any = EngineArgs(
        model=str(model), dtype="float32", max_model_len=CONTEXT_TOKENS, enforce_eager=True
    ).create_engine_config()
    renderer: Any = renderer_from_config(config)
    llm: Any = SimpleNamespace(renderer=renderer, vllm_config=config)
    eos = [renderer.get_eos_token_id()]
    settings = EngineSettings.model_validate({"model": str(model), **parsers})
    return TemplateChat(ChatProcessor(llm, settings, eos), renderer.get_tokenizer())


def write_tokenizer(model: Path, template: str | dict[str, str]) -> Path:
    """Writes a tokenizer in which markers of Qwen3's parsers are tokens, as in its own."""
    shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("chat_template*"))
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = template if isinstance(template, str) else _named(template)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    plain = dict(tokenizer["added_tokens"][0], special=False)
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>")
    start = len(tokenizer["model"]["vocab"])
    tokenizer["added_tokens"] += [
        {**plain, "id": start + i, "content": mark} for i, mark in enumerate(marks)
    ]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    return model


def _named(templates: dict[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "template": template} for name, template in templates.items()]

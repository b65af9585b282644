"""Chat templates of model families, with small tokenizers that have their special tokens.

Qwen3, Qwen3.5, Llama, gpt-oss, DeepSeek and GLM are the models' own templates, as TRL (Apache-2.0)
distributes them; the one in the style of Mistral's is written here. TRL's wheel is installed beside
the environment and not part of this repository.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from vllm.engine.arg_utils import EngineArgs
from vllm.renderers.registry import renderer_from_config

from engine.openai_server.server import VllmOpenAIServer
from engine.requests.chat_conversion import ChatProcessor
from engine.settings import EngineSettings
from engine.types.chat import ChatRequest
from tests.compat.programs import ROOT, install
from tests.engine.seedling import MODEL

CONTEXT_TOKENS = 16384
MISTRAL = """\
{%- set last = messages | selectattr('role', 'equalto', 'user') | list | last %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and message == last %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + ', "id": "' + call.id + '"}' }}
            {{- ', ' if not loop.last }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | tojson }}
        {{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A chat template and its tokens. `ends` are the EOS tokens; the template writes the first."""

    template: str
    ends: Sequence[str]
    special: Sequence[str]
    added: Sequence[str] = ()
    bos: str | None = None

    def text(self) -> str:
        """The template's text, as vLLM renders it: arguments of tool calls are objects."""
        if "{" in self.template:
            return self.template
        install("clients")
        path = ROOT / ".clients" / "trl" / "chat_templates" / f"{self.template}.jinja"
        arguments = "tool['function']['arguments']"
        return path.read_text("utf-8").replace(f"+ {arguments} +", f"+ ({arguments} | tojson) +")


CHATML = ("<|im_end|>", "<|endoftext|>")
QWEN_ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>")
HEADERS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>")
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|startoftext|>")
DEEPSEEK = (
    *("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜begin▁of▁sentence｜>"),
    *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
    *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)
FAMILIES = {
    "qwen3": Family(template="qwen3", ends=CHATML, special=("<|im_start|>",), added=QWEN_ADDED),
    "qwen3_5": Family(
        template="qwen3_5_think", ends=CHATML, special=("<|im_start|>",), added=QWEN_ADDED
    ),
    "llama3": Family(
        template="llama3_1",
        ends=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
        special=HEADERS,
        bos="<|begin_of_text|>",
    ),
    "mistral": Family(
        template=MISTRAL,
        ends=("</s>",),
        special=(
            *("<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
            *("[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        bos="<s>",
    ),
    "gpt_oss": Family(
        template="gptoss", ends=("<|return|>", "<|call|>", "<|endoftext|>"), special=HARMONY
    ),
    "deepseek_v3": Family(
        template="deepseekv3",
        ends=("<｜end▁of▁sentence｜>",),
        special=DEEPSEEK,
        added=("<think>", "</think>"),
        bos="<｜begin▁of▁sentence｜>",
    ),
    "glm": Family(
        template="glm4moe",
        ends=("<|user|>", "<|observation|>", "<|endoftext|>"),
        special=("<|system|>", "<|assistant|>", "[gMASK]", "<sop>"),
        added=("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyEngine:
    """The part of an engine that renders chats, with vLLM's renderer of a family."""

    chat: ChatProcessor
    openai_server: VllmOpenAIServer
    tokenizer: Any
    ends: Sequence[int]
    max_context_tokens: int

    def encode_chat(self, chat_request: ChatRequest) -> list[int]:
        return self.chat.encode(chat_request)

    def encode_chat_after(
        self, chat_request: ChatRequest, index: int, *, last_token: int
    ) -> list[int]:
        return self.chat.encode_after(chat_request, index, last_token=last_token)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def pieces(self, text: str) -> list[int]:
        """Tokens of a text, none of which is merged: a policy samples shorter tokens, too."""
        added = sorted(self.tokenizer.get_added_vocab(), key=len, reverse=True)
        pattern = "|".join(map(re.escape, added)) + "|(?s:.)"
        return [token for piece in re.findall(pattern, text) for token in self.encode(piece)]

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))


def make_engine(
    directory: Path, family: Family, *, max_context_tokens: int = CONTEXT_TOKENS, **parsers: str
) -> FamilyEngine:
    """`parsers` are the settings `tool_parser` and `reasoning_parser`."""
    model = _write_model(directory, family, max_context_tokens)
    config: Any = EngineArgs(
        model=str(model), dtype="float32", max_model_len=max_context_tokens, enforce_eager=True
    ).create_engine_config()
    renderer: Any = renderer_from_config(config)
    llm: Any = SimpleNamespace(renderer=renderer, vllm_config=config)
    tokenizer = renderer.get_tokenizer()
    ends = tokenizer.convert_tokens_to_ids(list(family.ends))
    settings = EngineSettings.model_validate({"model": str(model), **parsers})
    chat = ChatProcessor(llm, settings, ends)
    return FamilyEngine(
        chat=chat,
        openai_server=VllmOpenAIServer(config, renderer, settings),
        tokenizer=tokenizer,
        ends=ends,
        max_context_tokens=max_context_tokens,
    )


def _write_model(directory: Path, family: Family, max_context_tokens: int) -> Path:
    directory.mkdir(parents=True)
    config = json.loads((MODEL / "config.json").read_text())
    config["max_position_embeddings"] = max_context_tokens
    (directory / "config.json").write_text(json.dumps(config))
    _tokenizer(family).save(str(directory / "tokenizer.json"))
    options = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": family.ends[0],
        "bos_token": family.bos,
        "chat_template": family.text(),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(options))
    return directory


def _tokenizer(family: Family) -> Tokenizer:
    """Byte-level BPE with a few merges, so that one text has several tokenizations."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the user asks and the tool answers " * 20], trainer)
    special = dict.fromkeys((*family.special, *family.ends))
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in special])
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in family.added])
    return tokenizer

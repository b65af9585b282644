"""vLLM's serving classes for the fake engine, with a tokenizer of one token per character."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from vllm.config import ModelConfig, VllmConfig
from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.renderers import renderer_from_config
from vllm.tool_parsers import ToolParser, ToolParserManager

from engine.openai_server.server import VllmOpenAIServer
from engine.settings import EngineSettings

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role') }}{% endif %}"
    "{{ message.content }}{% endfor %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 256,
    "max_position_embeddings": 2**22,
    "bos_token_id": None,
    "eos_token_id": 0,
    "dtype": "float32",
}


@ToolParserManager.register_module("fake")
class FirstToolParser(ToolParser):  # type: ignore[misc]
    """With tools, every response calls the first one without arguments."""

    def extract_tool_calls(self, model_output: str, request: Any) -> Any:
        if not request.tools:
            return ExtractedToolCallInformation(
                tools_called=False, tool_calls=[], content=model_output
            )
        function = FunctionCall(name=_first_name(request), arguments="{}")
        return ExtractedToolCallInformation(
            tools_called=True, tool_calls=[ToolCall(function=function)], content=None
        )

    def extract_tool_calls_streaming(
        self, previous_text: str, current_text: str, delta_text: str, *args: Any
    ) -> Any:
        request = args[-1]
        if not request.tools:
            return DeltaMessage(content=delta_text)
        if previous_text:
            return None
        function = DeltaFunctionCall(name=_first_name(request), arguments="{}")
        call = DeltaToolCall(index=0, type="function", id="call-1", function=function)
        return DeltaMessage(tool_calls=[call])


def _first_name(request: Any) -> str:
    """Name of the first tool of a chat, or of a request to the Responses API."""
    [tool, *_] = request.tools
    return str(getattr(tool, "function", tool).name)


@cache
def _model() -> Path:
    """Directory of a model without weights, whose token i is the character i."""
    path = Path(mkdtemp(prefix="fake-model-"))
    vocabulary = {chr(number): number for number in range(256)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "chat_template": TEMPLATE,
                "clean_up_tokenization_spaces": False,
            }
        )
    )
    return path


@cache
def fake_openai_server(max_context_tokens: int, name: str) -> VllmOpenAIServer:
    path = str(_model())
    model = ModelConfig(
        model=path,
        tokenizer=path,
        max_model_len=max_context_tokens,
        served_model_name=name,
        generation_config="vllm",
        dtype="float32",
        skip_tokenizer_init=False,
    )
    config = VllmConfig(model_config=model)
    settings = EngineSettings(model=path, tool_parser="fake")
    return VllmOpenAIServer(config, renderer_from_config(config), settings)

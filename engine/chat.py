"""Conversations to token ids and responses to replies, by vLLM's own renderer and parsers."""

import uuid
from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.parser.parser_manager import ParserManager
from vllm.renderers.hf import HfRenderer
from vllm.renderers.params import ChatParams, TokenizeParams
from vllm.v1.engine.async_llm import AsyncLLM

from engine.chat_template import template_options, template_variables
from engine.errors import PromptTooLong, RequestRefused, StartFailed
from engine.protocol import Conversation, Reply, ToolCall
from engine.settings import EngineSettings


class Chat:
    """Of one started engine. Not to be shared between threads, like the tokenizer."""

    def __init__(self, llm: AsyncLLM, settings: EngineSettings) -> None:
        self._renderer: Any = llm.renderer
        self._model_config = llm.vllm_config.model_config
        self._parser = _parser(self._tokenizer, settings)
        self._bounds = TokenizeParams(
            max_total_tokens=self._model_config.max_model_len, add_special_tokens=False
        )
        self.template_variables = template_variables(self._renderer, self._model_config)

    def encode(self, conversation: Conversation) -> list[int]:
        prompt = self._rendered(conversation)
        try:
            return list(self._renderer.tokenize_prompt(prompt, self._bounds)["prompt_token_ids"])
        except VLLMValidationError as error:
            raise PromptTooLong(error.args[0]) from error

    def _rendered(self, conversation: Conversation) -> Any:
        """Text, which is measured before it is tokenized; renderers without a template of Jinja's
        may answer tokens."""
        params = ChatParams(
            chat_template_kwargs={
                **template_options(conversation.template_options, self.template_variables),
                "add_generation_prompt": conversation.add_generation_prompt,
                "tools": [dict(tool) for tool in conversation.tools] or None,
                "tokenize": not isinstance(self._renderer, HfRenderer),
            }
        )
        messages = [dict(message) for message in conversation.messages]
        try:
            _request(conversation)  # a reply to it will be parsed by what it says
            _, prompt = self._renderer.render_messages(messages, params)
        # A template is a program of the model's and raises what it likes.
        except Exception as error:
            raise RequestRefused("the chat template does not render these messages") from error
        return prompt

    def reply(self, token_ids: Sequence[int], conversation: Conversation) -> Reply:
        if self._parser is None:
            return Reply(content=self._text(token_ids, skip_special=True))
        request = _request(conversation)
        parser = self._parser(
            self._tokenizer,
            request.tools,
            chat_template_kwargs=dict(conversation.template_options),
            model_config=self._model_config,
        )
        request = parser.adjust_request(request)  # some find tool calls by special tokens
        reasoning, content, calls = parser.parse(
            self._text(token_ids, skip_special=request.skip_special_tokens),
            request,
            enable_auto_tools=bool(conversation.tools),
            model_output_token_ids=list(token_ids),
        )
        return Reply(content=content, reasoning=reasoning, tool_calls=_tool_calls(calls))

    @property
    def _tokenizer(self) -> Any:
        return self._renderer.get_tokenizer()

    def _text(self, token_ids: Sequence[int], *, skip_special: bool) -> str:
        """Where special tokens are kept, the one that ends the response is none of its text."""
        kept = list(token_ids)
        if kept and not skip_special and kept[-1] == self._renderer.get_eos_token_id():
            kept.pop()
        return str(self._tokenizer.decode(kept, skip_special_tokens=skip_special))


def _parser(tokenizer: Any, settings: EngineSettings) -> Any:
    try:
        return ParserManager.get_parser(
            tool_parser_name=settings.tool_parser,
            reasoning_parser_name=settings.reasoning_parser,
            enable_auto_tools=settings.tool_parser is not None,
            model_name=settings.model,
            tokenizer=tokenizer,
        )
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise StartFailed(f"the parser cannot be used: {error}") from error


def _request(conversation: Conversation) -> ChatCompletionRequest:
    """vLLM's parsers look at the request that they parse a response to."""
    given: dict[str, Any] = {"messages": [dict(message) for message in conversation.messages]}
    if conversation.tools:
        given["tools"] = [dict(tool) for tool in conversation.tools]
    return ChatCompletionRequest.model_validate(given)


def _tool_calls(calls: Any) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(id=call.id or f"call_{uuid.uuid4().hex}", name=call.name, arguments=call.arguments)
        for call in calls or ()
    )

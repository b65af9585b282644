"""Conversations to token ids and responses to replies, by vLLM's own renderer and parsers."""

import copy
import logging
import traceback
import uuid
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionToolsParam,
)
from vllm.exceptions import VLLMValidationError
from vllm.parser.parser_manager import ParserManager
from vllm.renderers.hf import HfRenderer
from vllm.renderers.params import ChatParams, TokenizeParams
from vllm.v1.engine.async_llm import AsyncLLM

from engine.errors import ConversationRefused, PromptTooLong, RequestRefused, StartFailed
from engine.io.chat_template import template_options, template_variables
from engine.protocol import Conversation, Reply, ToolCall
from engine.settings import EngineSettings

log = logging.getLogger(__name__)

MAX_ARGUMENTS_CHARACTERS = 2**20
"""Of one tool call. Longer than most contexts, and parsed in some milliseconds."""

_FORM = {
    "messages": "not messages of OpenAI's chat API; a tool call needs id, type, function.name, "
    "and function.arguments as a string of JSON",
    "tools": "not tools of OpenAI's chat API",
}


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
        options = template_options(conversation.template_options, self.template_variables)
        request = _request(conversation)
        self._check_parser(request, conversation)
        prompt = self._rendered(request.messages, conversation, options)
        try:
            return list(self._renderer.tokenize_prompt(prompt, self._bounds)["prompt_token_ids"])
        except VLLMValidationError as error:
            raise PromptTooLong(error.args[0]) from error

    def _rendered(
        self, messages: list[Any], conversation: Conversation, options: dict[str, Any]
    ) -> Any:
        """Text, which is measured before it is tokenized; renderers without a template of Jinja's
        may answer tokens."""
        params = ChatParams(
            chat_template_kwargs={
                **options,
                "add_generation_prompt": conversation.add_generation_prompt,
                "tools": copy.deepcopy(list(conversation.tools)) or None,
                "tokenize": not isinstance(self._renderer, HfRenderer),
            }
        )
        try:
            _, prompt = self._renderer.render_messages(messages, params)
        # A template is a program of the model's and raises what it likes.
        except Exception as error:
            raise RequestRefused("the chat template does not render these messages") from error
        return prompt

    def reply(self, token_ids: Sequence[int], conversation: Conversation) -> Reply:
        if self._parser is None:
            return Reply(content=self._text(token_ids, skip_special=True))
        try:
            return self._parsed(token_ids, conversation)
        # A parser meets whatever a model writes; the sample is worth more than its parts.
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            log.warning(
                "a response is not parsed: %s at %s:%s",
                type(error).__name__,  # its message may hold the response
                place.filename,
                place.lineno,
            )
            return Reply(content=self._text(token_ids, skip_special=True), parsed=False)

    def _parsed(self, token_ids: Sequence[int], conversation: Conversation) -> Reply:
        parser, request = self._parser_of(_checked_request(conversation), conversation)
        reasoning, content, calls = parser.parse(
            self._text(token_ids, skip_special=request.skip_special_tokens),
            request,
            enable_auto_tools=bool(conversation.tools),
            model_output_token_ids=list(token_ids),
        )
        return Reply(content=content, reasoning=reasoning, tool_calls=_tool_calls(calls))

    def _parser_of(
        self, request: ChatCompletionRequest, conversation: Conversation
    ) -> tuple[Any, ChatCompletionRequest]:
        """Some parsers adjust the request, to find tool calls by special tokens."""
        parser = self._parser(
            self._tokenizer,
            request.tools,
            chat_template_kwargs=dict(conversation.template_options),
            model_config=self._model_config,
        )
        return parser, parser.adjust_request(request)

    def _check_parser(self, request: ChatCompletionRequest, conversation: Conversation) -> None:
        """Before samples are drawn that no parser could be made for."""
        if self._parser is None:
            return
        try:
            self._parser_of(request, conversation)
        except Exception as error:  # a parser raises what it likes
            field = "tools" if conversation.tools else "chat_template_kwargs"
            raise ConversationRefused(field, "the engine's parser does not take them") from error

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
    """The request that vLLM's parsers read, from a deep copy: vLLM renames fields of messages, and
    its renderer replaces the arguments of tool calls."""
    given: dict[str, Any] = {"messages": copy.deepcopy(list(conversation.messages))}
    if conversation.tools:
        given["tools"] = copy.deepcopy(list(conversation.tools))
    try:
        request = ChatCompletionRequest.model_validate(given)
    except ValidationError as error:
        of_tools = error.errors(include_input=False, include_url=False)[0]["loc"][:1] == ("tools",)
        field = "tools" if of_tools else "messages"
        raise ConversationRefused(field, _FORM[field]) from error
    except VLLMValidationError as error:
        raise ConversationRefused(error.parameter or "messages", error.args[0]) from error
    _check_arguments(request.messages)
    return request


def _check_arguments(messages: list[Any]) -> None:
    """Before the renderer parses them, in one step that holds up all other threads. It leaves the
    calls of other roles than the assistant's alone, and so did the validation."""
    spoken = [message for message in messages if message["role"] == "assistant"]
    calls = [call for message in spoken for call in message.get("tool_calls") or ()]
    functions = [call["function"] for call in calls if "function" in call]
    if any(len(function["arguments"]) > MAX_ARGUMENTS_CHARACTERS for function in functions):
        limit = f"at most {MAX_ARGUMENTS_CHARACTERS} characters"
        raise ConversationRefused("messages", f"function.arguments: {limit} are taken")


def _checked_request(conversation: Conversation) -> ChatCompletionRequest:
    """The same without the checks, which one of a thousand replies need not repeat."""
    tools = [ChatCompletionToolsParam.model_validate(tool) for tool in conversation.tools]
    return ChatCompletionRequest.model_construct(
        messages=list(conversation.messages),
        tools=tools or None,
        tool_choice="auto" if tools else "none",
    )


def _tool_calls(calls: Any) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(id=call.id or f"call_{uuid.uuid4().hex}", name=call.name, arguments=call.arguments)
        for call in calls or ()
    )

"""Chat messages to token ids and back, by vLLM's renderer and parsers."""

import asyncio
import copy
import logging
import time
import traceback
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionToolsParam,
)
from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.parser.parser_manager import ParserManager
from vllm.renderers.chat_utils import has_non_text_content
from vllm.renderers.hf import HfRenderer
from vllm.renderers.params import ChatParams, TokenizeParams
from vllm.v1.engine.async_llm import AsyncLLM

from engine.errors import (
    ConversationRefused,
    NoTurnEnd,
    PromptTooLong,
    RequestRefused,
    StartFailed,
)
from engine.launch.chat_template import load_template
from engine.protocol.text import DEFAULT_SAMPLING
from engine.requests import images
from engine.requests.chat_template_kwargs import template_options, template_variables
from engine.requests.stop_text import response_text
from engine.requests.turn_ends import Mark, Tail, TurnEnds, special_tokens
from engine.settings import EngineSettings
from engine.types.chat import ChatRequest, ChatResponse, EncodedPrompt, ToolCall, truncated
from engine.types.samples import Sampling

log = logging.getLogger(__name__)
MAX_ARGUMENTS_CHARACTERS = 2**20
"""Limit of a tool call's arguments. Longer than most contexts, and parsed within milliseconds."""
UNBOUNDED = TokenizeParams(max_total_tokens=None, add_special_tokens=False)
"""For prompts that are truncated here: with its own truncation a tokenizer is not thread-safe."""
_FORM = {
    "messages": "not valid messages of OpenAI's chat API; a tool call needs id, type, "
    "function.name, and function.arguments as a JSON string",
    "tools": "not valid tools of OpenAI's chat API",
}


class ChatProcessor:
    """Encodes chat requests and parses responses. Not thread-safe, as the tokenizer is not."""

    def __init__(
        self, llm: AsyncLLM, settings: EngineSettings, eos_token_ids: Collection[int]
    ) -> None:
        self._renderer: Any = llm.renderer
        self._model_config = llm.vllm_config.model_config
        self._parser = _response_parser(self._tokenizer, settings)
        self._bounds = TokenizeParams(
            max_total_tokens=self._model_config.max_model_len, add_special_tokens=False
        )
        self._turn_ends: TurnEnds | None = None
        if isinstance(self._renderer, HfRenderer):
            self._turn_ends = TurnEnds(special_tokens(self._tokenizer), eos_token_ids)
        self._template = load_template(settings.chat_template)
        self.template_variables = template_variables(
            self._renderer, self._model_config, self._template
        )

    def encode(self, chat_request: ChatRequest) -> list[int]:
        options = template_options(chat_request.template_options, self.template_variables)
        request = _openai_request(chat_request)
        self._check_parser(request, chat_request)
        prompt = self._rendered(request.messages, chat_request, options)
        number = chat_request.truncate_prompt_tokens
        token_ids = self._tokenized(prompt, self._bounds if number is None else UNBOUNDED)
        return truncated(token_ids, number, chat_request.truncation_side)

    def encode_with_images(self, chat_request: ChatRequest) -> EncodedPrompt:
        options = template_options(chat_request.template_options, self.template_variables)
        request = _openai_request(chat_request)
        self._check_parser(request, chat_request)
        with images.within(images.ImageBudget()) as budget:
            try:
                _, prompt = self._renderer.render_messages(
                    request.messages, self._params(chat_request, options)
                )
                tokens = self._renderer.tokenize_prompt(prompt, UNBOUNDED)
                # In the thread in which vLLM processes the images of all requests.
                found = asyncio.run(
                    self._renderer.process_for_engine_async(tokens, time.time(), skip_mm_cache=True)
                )
            except (VLLMError, ValueError, NotImplementedError) as error:
                message = error.args[0] if isinstance(error, VLLMValidationError) else str(error)
                raise ConversationRefused("messages", message) from error
        return EncodedPrompt(list(found["prompt_token_ids"]), found, budget.num_pixels)

    def encode_after(self, chat_request: ChatRequest, index: int, *, last_token: int) -> list[int]:
        """Tokens after the assistant's message at `index`; renders the chat twice at most.

        Raises NoTurnEnd for renderers without a Jinja template, which may not return text.
        """
        if self._turn_ends is None:
            raise NoTurnEnd("the model has no Jinja chat template")
        options = template_options(chat_request.template_options, self.template_variables)
        mark = Mark()
        marked = replace(chat_request, messages=mark.in_messages(chat_request.messages, index))
        request = _openai_request(marked)
        self._check_parser(request, chat_request)
        alone = replace(
            marked,
            messages=marked.messages[: index + 1],
            add_generation_prompt=False,
            continue_final_message=False,
        )

        def render_alone() -> str:
            rendered = self._rendered(_openai_request(alone).messages, alone, options)
            return str(rendered["prompt"])

        whole = str(self._rendered(request.messages, marked, options)["prompt"])
        return self._tail_tokens(self._turn_ends.tail(mark, whole, cache(render_alone), last_token))

    def _tail_tokens(self, tail: Tail) -> list[int]:
        if not tail.text:
            return []
        token_ids = self._tokenized({"prompt": tail.text}, self._bounds)
        if tail.dropped_token is None:
            return token_ids
        if token_ids[:1] != [tail.dropped_token]:
            raise NoTurnEnd("the token that ends a message is not encoded as one")
        return token_ids[1:]

    def _tokenized(self, prompt: Any, bounds: TokenizeParams) -> list[int]:
        try:
            return list(self._renderer.tokenize_prompt(prompt, bounds)["prompt_token_ids"])
        except VLLMValidationError as error:
            raise PromptTooLong(error.args[0]) from error

    def _rendered(
        self, messages: list[Any], chat_request: ChatRequest, options: dict[str, Any]
    ) -> Any:
        """Render the prompt of a chat, as text, so that its length is checked before tokenization.

        Renderers without a Jinja template may return tokens.
        """
        if has_non_text_content(list(chat_request.messages)):
            raise ConversationRefused("messages", "images are not supported here: send text")
        try:
            _, prompt = self._renderer.render_messages(
                messages, self._params(chat_request, options)
            )
        # A template is code of the model and may raise anything.
        except Exception as error:
            raise RequestRefused(
                "the model's chat template failed to render these messages"
            ) from error
        return prompt

    def _params(self, chat_request: ChatRequest, options: dict[str, Any]) -> ChatParams:
        return ChatParams(
            chat_template=self._template,
            chat_template_kwargs={
                **options,
                "add_generation_prompt": chat_request.add_generation_prompt,
                "continue_final_message": chat_request.continue_final_message,
                "tools": copy.deepcopy(list(chat_request.tools)) or None,
                "tokenize": not isinstance(self._renderer, HfRenderer),
            },
        )

    def chat_response(
        self,
        token_ids: Sequence[int],
        chat_request: ChatRequest,
        *,
        stop_reason: int | str | None = None,
        sampling: Sampling = DEFAULT_SAMPLING,
    ) -> ChatResponse:
        text = partial(self._response_text, token_ids, stop_reason, sampling=sampling)
        if self._parser is None:
            return ChatResponse(content=text(skip_special=True))
        try:
            return self._parsed(text, token_ids, chat_request)
        # Models may generate malformed text; the sample is kept without its parts.
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            log.warning(
                "a response could not be parsed: %s at %s:%s",
                type(error).__name__,  # the message may contain the response
                place.filename,
                place.lineno,
            )
            return ChatResponse(content=text(skip_special=True), parsed=False)

    def _response_text(
        self,
        token_ids: Sequence[int],
        stop_reason: int | str | None,
        *,
        sampling: Sampling,
        skip_special: bool,
    ) -> str:
        return response_text(
            partial(self._decode, sampling=sampling, skip_special=skip_special),
            token_ids,
            stop_reason,
            include_stop_str=sampling.include_stop_str_in_output,
        )

    def _parsed(
        self, text: Callable[..., str], token_ids: Sequence[int], chat_request: ChatRequest
    ) -> ChatResponse:
        parser, request = self._parser_of(_checked_request(chat_request), chat_request)
        reasoning, content, calls = parser.parse(
            text(skip_special=request.skip_special_tokens),
            request,
            enable_auto_tools=bool(chat_request.tools),
            model_output_token_ids=list(token_ids),
        )
        return ChatResponse(
            content=content,
            reasoning=reasoning,
            tool_calls=_tool_calls(calls),
        )

    def _parser_of(
        self, request: ChatCompletionRequest, chat_request: ChatRequest
    ) -> tuple[Any, ChatCompletionRequest]:
        """A response parser and the request as adjusted by it, e.g. to keep special tokens."""
        parser = self._parser(
            self._tokenizer,
            request.tools,
            chat_template_kwargs=dict(chat_request.template_options),
            model_config=self._model_config,
        )
        return parser, parser.adjust_request(request)

    def _check_parser(self, request: ChatCompletionRequest, chat_request: ChatRequest) -> None:
        """Check that a parser can be made for the request, before samples are generated."""
        if self._parser is None:
            return
        try:
            self._parser_of(request, chat_request)
        except Exception as error:  # a parser may raise anything
            field = "tools" if chat_request.tools else "chat_template_kwargs"
            raise ConversationRefused(
                field, "the engine's tool or reasoning parser does not accept this value"
            ) from error

    @property
    def _tokenizer(self) -> Any:
        return self._renderer.get_tokenizer()

    def _decode(self, token_ids: Sequence[int], *, skip_special: bool, sampling: Sampling) -> str:
        """Decode a response. If special tokens are kept, a final EOS token is dropped."""
        ids = list(token_ids)
        skip_special = skip_special and sampling.skip_special_tokens
        if ids and not skip_special and ids[-1] == self._renderer.get_eos_token_id():
            ids.pop()
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special))


def _openai_request(chat_request: ChatRequest) -> ChatCompletionRequest:
    """Validate a chat request and convert a deep copy of it to vLLM's request type.

    vLLM renames fields of messages, and its renderer replaces the arguments of tool calls.
    """
    fields: dict[str, Any] = {"messages": copy.deepcopy(list(chat_request.messages))}
    if chat_request.tools:
        fields["tools"] = copy.deepcopy(list(chat_request.tools))
    try:
        request = ChatCompletionRequest.model_validate(fields)
    except ValidationError as error:
        of_tools = error.errors(include_input=False, include_url=False)[0]["loc"][:1] == ("tools",)
        field = "tools" if of_tools else "messages"
        raise ConversationRefused(field, _FORM[field]) from error
    except VLLMValidationError as error:
        raise ConversationRefused(error.parameter or "messages", error.args[0]) from error
    _check_arguments(request.messages)
    return request


def _check_arguments(messages: list[Any]) -> None:
    """Refuse tool call arguments above the size limit, before the renderer parses them.

    The renderer parses them while it blocks all other threads. It ignores tool calls of other roles
    than the assistant, as validation does.
    """
    from_assistant = [message for message in messages if message["role"] == "assistant"]
    calls = [call for message in from_assistant for call in message.get("tool_calls") or ()]
    functions = [call["function"] for call in calls if "function" in call]
    if any(len(function["arguments"]) > MAX_ARGUMENTS_CHARACTERS for function in functions):
        raise ConversationRefused(
            "messages",
            f"function.arguments: the limit is {MAX_ARGUMENTS_CHARACTERS} characters",
        )


def _checked_request(chat_request: ChatRequest) -> ChatCompletionRequest:
    """Convert an already validated chat request to vLLM's request type."""
    tools = [ChatCompletionToolsParam.model_validate(tool) for tool in chat_request.tools]
    return ChatCompletionRequest.model_construct(
        messages=list(chat_request.messages),
        tools=tools or None,
        tool_choice="auto" if tools else "none",
    )


def _response_parser(tokenizer: Any, settings: EngineSettings) -> Any:
    try:
        return ParserManager.get_parser(
            tool_parser_name=settings.tool_parser,
            reasoning_parser_name=settings.reasoning_parser,
            enable_auto_tools=settings.tool_parser is not None,
            model_name=settings.model,
            tokenizer=tokenizer,
        )
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise StartFailed(
            f"engine.tool_parser or engine.reasoning_parser cannot be used: {error}"
        ) from error


def _tool_calls(calls: Any) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(
            id=call.id or f"call_{uuid.uuid4().hex}",
            name=_encodable(call.name),
            arguments=_encodable(call.arguments),
        )
        for call in calls or ()
    )


def _encodable(text: str) -> str:
    """The text with U+FFFD for the lone surrogates that parsers decode from a call's JSON."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

"""Renderer of the prompts of a session's calls, and parser that records what the agent receives."""

import copy
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from vllm.entrypoints.serve.utils.tool_calls_utils import maybe_filter_parallel_tool_calls
from vllm.exceptions import VLLMValidationError
from vllm.inputs.engine import tokens_input
from vllm.parser.abstract_parser import Parser
from vllm.renderers import ChatParams, TokenizeParams
from vllm.renderers.chat_utils import has_non_text_content, make_tool_call_id
from vllm.renderers.online_renderer import OnlineRenderer

from engine.protocol.openai_server import ApiCall
from engine.types.chat import ChatRequest, ChatResponse, ToolCall

_NOT_OPTIONS = frozenset({"tools", "add_generation_prompt", "continue_final_message", "tokenize"})


def session_renderer(shared: OnlineRenderer, call: ApiCall) -> OnlineRenderer:
    """Renderer whose prompts are those of a session, and that adds no constraint on tool calls."""
    renderer = copy.copy(shared)
    renderer.renderer = SessionRenderer(shared.renderer, call)
    if shared.parser is not None:
        renderer.parser = _without_constraint(shared.parser)
    return renderer


class SessionRenderer:
    """vLLM's renderer, whose prompts of chats and texts are those of a session."""

    def __init__(self, renderer: Any, call: ApiCall) -> None:
        self._renderer = renderer
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    async def render_chat_async(
        self,
        conversations: Sequence[list[Any]],
        chat_params: ChatParams,
        tok_params: TokenizeParams,
        **_: Any,
    ) -> tuple[list[Any], list[Any]]:
        [messages] = conversations
        messages[:] = map(_plain, messages)
        if has_non_text_content(messages):
            raise VLLMValidationError(
                "a session has text only: remove images and other media", parameter="messages"
            )
        options = chat_params.chat_template_kwargs
        chat_request = ChatRequest(
            messages=messages,
            tools=options.get("tools") or (),
            template_options={
                name: value
                for name, value in options.items()
                if name not in _NOT_OPTIONS and value is not None
            },
            add_generation_prompt=options.get("add_generation_prompt", True),
            continue_final_message=options.get("continue_final_message", False),
            **_truncation(tok_params),
        )
        prompt = tokens_input(await self._call.chat_prompt(chat_request))
        prompt["arrival_time"] = time.time()
        return [messages], [prompt]

    async def render_cmpl_async(
        self, prompts: Sequence[Any], tok_params: TokenizeParams, **_: Any
    ) -> list[Any]:
        if len(prompts) != 1 or isinstance(prompts[0], bytes):
            raise VLLMValidationError(
                "a call of a session has one prompt, of text or token ids", parameter="prompt"
            )
        [prompt] = prompts
        given = prompt.get("prompt_token_ids") or prompt.get("prompt")
        token_ids = await self._call.text_prompt(given, **_truncation(tok_params))
        return [tokens_input(token_ids, prompt=prompt.get("prompt"))]


def _truncation(params: TokenizeParams) -> dict[str, Any]:
    """Number of tokens to keep of a prompt, and the side that is truncated."""
    number = params.truncate_prompt_tokens
    if number is None:
        return {}
    if number == 0:
        raise VLLMValidationError("must not be 0", parameter="truncate_prompt_tokens")
    if number < 0:
        number = params.max_truncation_tokens
    side = params.truncation_side or "left"
    return {"truncate_prompt_tokens": number, "truncation_side": side}


def _without_constraint(parser: type[Parser]) -> type[Parser]:
    """Subclass of a parser that leaves calls of tools that the model chooses unconstrained.

    vLLM constrains those of `strict` tools. Agents send them by default, but the policy is to
    sample from its own distribution.
    """

    class UnconstrainedParser(parser):  # type: ignore[misc]
        def adjust_request(self, request: Any) -> Any:
            has_own = request.extract_structured_outputs() is not None
            adjusted = super().adjust_request(request)
            if request.tool_choice in (None, "auto") and not has_own:
                adjusted.structured_outputs = None
            return adjusted

    return UnconstrainedParser


def _plain(value: Any) -> Any:
    """A value of a message without the iterators that vLLM's models leave in it."""
    match value:
        case None | str() | bool() | int() | float():
            return value
        case BaseModel():
            return value.model_dump(exclude_none=True)
        case Mapping():
            return {name: _plain(each) for name, each in value.items()}
        case _:
            return [_plain(each) for each in value]


def recording_parser(parser: type[Parser], call: ApiCall, *, first_index: int) -> Any:
    """Subclass of a parser that passes the parsed messages to `call.on_message`.

    Of parsers that parse deltas, the one that is made first has the sample `first_index`, and each
    later one the next sample. Whole samples are parsed in their order.
    """
    indexes, whole_indexes = itertools.count(first_index), itertools.count()

    class RecordingParser(parser):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._index = next(indexes)
            self._parts = _Parts()

        def parse(self, model_output: str, request: Any, *args: Any, **kwargs: Any) -> Any:
            reasoning, content, calls = super().parse(model_output, request, *args, **kwargs)
            for each in calls or ():
                each.id = each.id or make_tool_call_id()
            returned = maybe_filter_parallel_tool_calls(list(calls or ()), request)
            call.on_message(next(whole_indexes), _message(reasoning, content, returned))
            return reasoning, content, calls

        def parse_delta(
            self,
            delta_text: str,
            delta_token_ids: list[int],
            request: Any,
            *args: Any,
            finished: bool,
            **kwargs: Any,
        ) -> Any:
            delta = super().parse_delta(
                delta_text, delta_token_ids, request, *args, finished=finished, **kwargs
            )
            if delta is not None:
                delta = maybe_filter_parallel_tool_calls(delta, request)
                self._parts.add(delta)
            if finished:
                call.on_message(self._index, self._parts.message())
            return delta

    return RecordingParser


def _message(reasoning: str | None, content: str | None, calls: Sequence[Any]) -> ChatResponse:
    found = (ToolCall(id=each.id, name=each.name, arguments=each.arguments) for each in calls)
    return ChatResponse(content=content, reasoning=reasoning, tool_calls=tuple(found))


class _Parts:
    """Message of a stream's parts."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, list[str]] = {}
        self._ids: dict[int, tuple[str, str]] = {}

    def add(self, delta: Any) -> None:
        self._content += filter(None, [delta.content])
        self._reasoning += filter(None, [delta.reasoning])
        for part in delta.tool_calls or ():
            function = part.function
            if function is not None and function.name:
                self._ids[part.index] = (str(part.id), function.name)
            arguments = (function and function.arguments) or ""
            self._calls.setdefault(part.index, []).append(arguments)

    def message(self) -> ChatResponse:
        return ChatResponse(
            content="".join(self._content) or None,
            reasoning="".join(self._reasoning) or None,
            tool_calls=tuple(
                ToolCall(
                    id=self._ids[index][0],
                    name=self._ids[index][1],
                    arguments="".join(self._calls[index]),
                )
                for index in sorted(self._ids)
            ),
        )

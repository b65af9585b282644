"""POST /v1/chat/completions with OpenAI's fields and vLLM's extensions.

The messages are tokenized with the model's own chat template. Tool calls and reasoning are
extracted from a response by the parsers that the engine is configured with.
"""

import asyncio
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Response
from pydantic import Field

from coppice.wire.rollouts import RolloutAnswer, SampleAnswer
from engine.types.chat import ChatRequest, ChatResponse, ToolCallPart
from engine.types.info import EngineInfo
from service.auth.access import requires_role
from service.compat.answer_fields import (
    finish_reason,
    name_of,
    support_field,
    unix_time,
    weight_version_spans,
)
from service.compat.bodies import (
    CompatModel,
    Flag,
    MaxTokens,
    Name,
    PromptTruncation,
    ReasoningEffort,
    TrueUnlessNull,
    effort_options,
    request_body,
)
from service.compat.chat.forced_tools import (
    NamedTool,
    ToolChoice,
    forced_constraint,
)
from service.compat.chat.samples import ChatSamples, MessageParts, count_ignored_options
from service.compat.event_stream import STREAM_RESPONSES, StreamFields, stream_response
from service.compat.logprobs import NumLogprobs
from service.compat.openai.chunks import ChatChunks
from service.compat.openai.echo import check_echo
from service.compat.openai_errors import OpenAIRoute
from service.compat.request import CommonRequestFields, Compat
from service.compat.sampling_fields import SamplingFields
from service.errors import InvalidRequest
from service.rollouts.groups.logprob_tables import check_count

router = APIRouter(route_class=OpenAIRoute)


class ChatMessage(CompatModel):
    """Chat message; its content is text or a list of text parts."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    task: str | None = None

    def to_template_message(self) -> dict[str, Any]:
        """Convert a chat message to the dict that the chat template renders.

        vLLM's renderer reads only `reasoning`, and passes both names to the template.
        """
        explicit = self.model_dump(exclude_none=True, include=set(type(self).model_fields))
        if self.reasoning is None and self.reasoning_content is not None:
            explicit["reasoning"] = self.reasoning_content
        return {**explicit, "content": self.text()}

    def text(self) -> str:
        if not isinstance(self.content, list):
            return self.content or ""
        if any(not isinstance(part.get("text"), str) for part in self.content):
            raise InvalidRequest.of_parameter(
                "messages", "only parts of type text are supported: remove images and other media"
            )
        return "".join(part["text"] for part in self.content)


class Function(CompatModel):
    """Function of a tool; `parameters` is a JSON schema that the chat template renders."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(CompatModel):
    type: Literal["function"] = "function"
    function: Function


class ChatBody(SamplingFields, CommonRequestFields, PromptTruncation, StreamFields):
    """Request body of POST /v1/chat/completions.

    `logprobs` returns the logprob of each sampled token, and the logprobs of the `top_logprobs`
    most likely tokens at its position. `echo` returns the last message before the response, if it
    is of the assistant.
    """

    is_chat = True
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096, fail_fast=True)]
    tools: Annotated[list[Tool], Field(max_length=1024, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: TrueUnlessNull = True
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: Flag = False
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: Flag = False
    top_logprobs: NumLogprobs | None = None
    echo: Flag = False
    return_tokens_as_token_ids: Flag = False

    def chat_request(self, info: EngineInfo) -> ChatRequest:
        return ChatRequest(
            messages=[message.to_template_message() for message in self.messages],
            tools=self._template_tools(),
            template_options={
                **effort_options(self.reasoning_effort),
                **(self.chat_template_kwargs or {}),
            },
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            truncate_prompt_tokens=self.prompt_tokens_to_keep(info),
            truncation_side=self.truncation_side or "left",
        )

    def echoed_text(self) -> str:
        """Text that is returned before each response; empty without `echo`."""
        last = self.messages[-1]
        return last.text() if self.echo and last.role == "assistant" else ""

    def _constraints(self) -> dict[str, dict[str, Any] | None]:
        forced = forced_constraint(
            self.tool_choice, self._template_tools, parallel=self.parallel_tool_calls
        )
        return {"tool_choice": forced, **super()._constraints()}

    def _template_tools(self) -> list[dict[str, Any]]:
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]

    def check(self) -> None:
        self.check_stream()
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest.of_parameter(
                "continue_final_message", "needs add_generation_prompt: false"
            )
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise InvalidRequest.of_parameter(
                "continue_final_message", "the last message must be of the assistant"
            )


@router.post(
    "/v1/chat/completions", responses=STREAM_RESPONSES, openapi_extra=request_body(ChatBody)
)
@requires_role("rollout")
async def chat(call: Compat) -> Response:
    body = await call.read(ChatBody)
    body.check()
    adapter = call.resolve_adapter(body.model)
    check_count(call.server.engine.info, top_logprobs=body.top_logprobs)
    chat_request = await asyncio.to_thread(body.chat_request, call.server.engine.info)
    effort = effort_options(body.reasoning_effort)
    count_ignored_options(call.server, body.chat_template_kwargs or {}, effort)
    prompt = await call.render(chat_request)
    if body.echo:
        check_echo([prompt], n=body.n)
    max_tokens = body.max_completion_tokens or body.max_tokens
    request = await asyncio.to_thread(body.rollout_request, [prompt], body, max_tokens, adapter)
    rollout = await call.start(
        request,
        cache_salt=body.cache_salt,
        num_top_logprobs=body.top_logprobs if body.logprobs else None,
        stream_tokens=body.stream,
    )
    samples = ChatSamples(
        call=call,
        chat_request=chat_request,
        tool_choice=body.tool_choice,
        prompt=prompt,
        rollout=rollout,
        parallel_tool_calls=body.parallel_tool_calls,
    )
    builder = ChatResponseBuilder(body, samples)
    if body.stream:
        return builder.stream_response()
    answer = await call.wait(rollout)
    choices = [await builder.choice(sample) for sample in answer.groups[0].samples]
    return await call.json_response(lambda: builder.answer(answer, choices))


class ChatResponseBuilder:
    """Builds the response to one chat request in OpenAI's format, as a whole or as a stream."""

    def __init__(
        self,
        body: ChatBody,
        samples: ChatSamples,
    ) -> None:
        self._server = samples.call.server
        self._body = body
        self._samples = samples
        self._prompt = samples.prompt
        self._rollout = samples.rollout

    def answer(self, answer: RolloutAnswer, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            **self._head("chat.completion", answer.id),
            "choices": choices,
            "usage": self._samples.usage(answer),
            **self._prompt_ids(),
        }

    async def choice(self, sample: SampleAnswer) -> dict[str, Any]:
        chat_response = await self._samples.message(sample)
        choice: dict[str, Any] = {
            "index": sample.index,
            "message": {
                "role": "assistant",
                "content": chat_response.content,
                **_message(_echoed(self._body.echoed_text(), chat_response)),
            },
            "finish_reason": self._finish_reason(sample, chat_response),
            "stop_reason": sample.stop_reason,
            "logprobs": await self._logprobs(sample) if self._body.logprobs else None,
            "weight_versions": weight_version_spans(sample),
            **(support_field(sample) if self._body.return_support else {}),
        }
        if self._body.return_token_ids:
            choice["token_ids"] = sample.token_ids
        return choice

    async def _logprobs(self, sample: SampleAnswer) -> dict[str, Any]:
        as_ids = self._body.return_tokens_as_token_ids
        return {"content": await self._samples.logprobs(sample, as_ids=as_ids)}

    def stream_response(self) -> Response:
        rollout, body = self._rollout, self._body
        chunks = ChatChunks(
            server=self._server,
            parts=MessageParts(self._samples),
            prompt=self._prompt,
            with_logprobs=body.logprobs,
            as_ids=body.return_tokens_as_token_ids,
            return_token_ids=body.return_token_ids,
            return_support=body.return_support,
            to_reason=self._finish_reason,
            echoed_text=body.echoed_text(),
            to_message=_delta,
        )
        head = self._head("chat.completion.chunk", rollout.id)
        return stream_response(
            self._server,
            rollout,
            head,
            chunks.of_part,
            body.stream_options,
            to_usage=self._samples.usage,
        )

    def _prompt_ids(self) -> dict[str, Any]:
        """Top-level response field with the prompt token ids; empty if they are not requested."""
        return {"prompt_token_ids": self._prompt} if self._body.return_token_ids else {}

    def _finish_reason(self, sample: SampleAnswer, chat_response: ChatResponse) -> str:
        """Finish reason of a sample.

        As in OpenAI's API, the finish reason of a call of a named function is `stop`.
        """
        reason, choice = finish_reason(sample), self._body.tool_choice
        if chat_response.tool_calls and reason == "stop" and not isinstance(choice, NamedTool):
            reason = "tool_calls"
        return reason

    def _head(self, kind: str, rollout_id: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{rollout_id}",
            "object": kind,
            "created": unix_time(),
            "model": name_of(self._server, self._body.model),
        }


def _echoed(text: str, chat_response: ChatResponse) -> ChatResponse:
    """The response with a text before its content."""
    if not text:
        return chat_response
    return replace(chat_response, content=text + (chat_response.content or ""))


def _message(chat_response: ChatResponse) -> dict[str, Any]:
    """Fields of a message that the response has."""
    message: dict[str, Any] = {}
    if chat_response.content is not None:
        message["content"] = chat_response.content
    if chat_response.reasoning is not None:
        message["reasoning_content"] = chat_response.reasoning
    if chat_response.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in chat_response.tool_calls
        ]
    return message


def _delta(chat_response: ChatResponse) -> dict[str, Any]:
    """Fields of a streamed message, with the parts of its tool calls."""
    delta = _message(replace(chat_response, tool_calls=()))
    if chat_response.tool_call_parts:
        delta["tool_calls"] = list(map(_call_delta, chat_response.tool_call_parts))
    return delta


def _call_delta(part: ToolCallPart) -> dict[str, Any]:
    if part.name is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"index": part.index, "id": part.id, "type": "function", "function": function}

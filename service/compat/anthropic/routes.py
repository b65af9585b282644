"""POST /v1/messages and /v1/messages/count_tokens with Anthropic's fields."""

import asyncio
import sys
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Response

from coppice.wire.rollouts import RolloutAnswer
from engine.types.chat import ChatRequest, ChatResponse
from service.auth.access import requires_role
from service.compat.answer_fields import name_of
from service.compat.anthropic.bodies import ConversationFields, CountTokensBody, MessagesBody
from service.compat.anthropic.errors import AnthropicRoute, as_anthropic
from service.compat.anthropic.stream import (
    content_blocks,
    extension_fields,
    message_events,
    ping,
    stop_fields,
    to_error,
    usage_fields,
)
from service.compat.bodies import request_body
from service.compat.chat.samples import ChatSamples, count_ignored_options
from service.compat.event_stream import EVENTS_OR_JSON, event_response
from service.compat.request import ROLLOUT_ERRORS, Compat, CompatRequest
from service.errors import NoChatTemplate, PromptTooLong
from service.http.exception_handlers import cancel_on_disconnect
from service.http.responses import JSON, declare_responses

router = APIRouter(route_class=AnthropicRoute)


@router.post(
    "/v1/messages",
    responses=as_anthropic(EVENTS_OR_JSON),
    openapi_extra=request_body(MessagesBody),
)
@requires_role("rollout", x_api_key=True)
async def create_message(call: Compat) -> Response:
    body = await call.read(MessagesBody)
    body.check()
    adapter = call.resolve_adapter(body.model)
    chat_request, prompt = await _rendered(call, body)
    request = await asyncio.to_thread(
        body.rollout_request, [prompt], body, body.max_tokens, adapter
    )
    rollout = await call.start(
        request, cache_salt=body.cache_salt, num_top_logprobs=None, stream_tokens=body.stream
    )
    samples = ChatSamples(
        call=call,
        chat_request=chat_request,
        tool_choice=body.openai_tool_choice(),
        prompt=prompt,
        rollout=rollout,
        parallel_tool_calls=body.parallel_tool_calls,
    )
    head = _head(body, samples)
    if body.stream:
        events = message_events(
            samples, head, token_ids=body.return_token_ids, support=body.return_support
        )
        return event_response(
            call.server, rollout, events, to_error=to_error, keep_alive=ping(), end=b""
        )
    answer = await call.wait(rollout)
    [sample] = answer.groups[0].samples
    samples.check_ended(sample)
    response = await samples.message(sample)
    return await call.json_response(lambda: _message(body, head, answer, response))


@router.post(
    "/v1/messages/count_tokens",
    responses=as_anthropic(declare_responses({200: JSON}, *ROLLOUT_ERRORS)),
    openapi_extra=request_body(CountTokensBody),
)
@requires_role("rollout", x_api_key=True)
async def count_tokens(call: Compat) -> dict[str, int]:
    """Number of tokens of the prompt that POST /v1/messages renders."""
    body = await call.read(CountTokensBody)
    call.resolve_adapter(body.model)
    try:
        _, prompt = await _rendered(call, body)
    except PromptTooLong:
        return {"input_tokens": await _long_count(call, body)}
    return {"input_tokens": len(prompt)}


async def _long_count(call: CompatRequest, body: ConversationFields) -> int:
    """Number of tokens of a conversation that is longer than the context.

    A request that truncates its prompt is rendered without a limit of its length.
    """

    async def count(*, merges_system: bool) -> int:
        chat_request = await asyncio.to_thread(body.chat_request, merges_system=merges_system)
        whole = replace(chat_request, truncate_prompt_tokens=sys.maxsize)
        rendering = call.server.tokenizer.rendered(whole)
        return len(await cancel_on_disconnect(call.request, rendering))

    try:
        return await count(merges_system=False)
    except NoChatTemplate:
        if not body.has_inline_system:
            raise
    return await count(merges_system=True)


async def _rendered(call: CompatRequest, body: ConversationFields) -> tuple[ChatRequest, list[int]]:
    """The chat request and its prompt.

    As in vLLM, system messages inside a conversation are moved to its start if the chat template
    refuses them where they are.
    """
    count_ignored_options(call.server, body.chat_template_kwargs or {}, body.reasoning_options())
    chat_request = await asyncio.to_thread(body.chat_request)
    try:
        return chat_request, await call.render(chat_request)
    except NoChatTemplate:
        if not body.has_inline_system:
            raise
    chat_request = await asyncio.to_thread(partial(body.chat_request, merges_system=True))
    return chat_request, await call.render(chat_request)


def _head(body: MessagesBody, samples: ChatSamples) -> dict[str, Any]:
    """Fields of a message that are known before its first token."""
    head: dict[str, Any] = {
        "id": f"msg_{samples.rollout.id}",
        "type": "message",
        "role": "assistant",
        "model": name_of(samples.call.server, body.model),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": len(samples.prompt), "output_tokens": 0},
    }
    return {**head, "prompt_token_ids": samples.prompt} if body.return_token_ids else head


def _message(
    body: MessagesBody, head: dict[str, Any], answer: RolloutAnswer, response: ChatResponse
) -> dict[str, Any]:
    [sample] = answer.groups[0].samples
    return {
        **head,
        "content": content_blocks(response, head["id"]),
        **stop_fields(sample, has_calls=bool(response.tool_calls)),
        "usage": usage_fields(answer),
        **extension_fields(sample, token_ids=body.return_token_ids, support=body.return_support),
    }

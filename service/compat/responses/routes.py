"""Routes under /v1/responses (OpenAI's Responses API): create, get and delete responses."""

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Response
from pydantic_core import from_json

from coppice.wire.rollouts import RolloutAnswer, SampleAnswer
from service.auth.access import requires_role
from service.cluster.registry import replica_id_of
from service.compat.answer_fields import (
    name_of,
    support_field,
    unix_time,
    usage,
    weight_version_spans,
)
from service.compat.bodies import request_body
from service.compat.chat.samples import ChatSamples, count_ignored_options
from service.compat.chat.streamed_message import with_whole_calls
from service.compat.event_stream import STREAM_RESPONSES, event_response
from service.compat.openai_errors import OpenAIRoute, as_openai
from service.compat.request import ROLLOUT_ERRORS, Compat, CompatRequest
from service.compat.responses.bodies import ENCRYPTED, LOGPROBS, ResponsesBody
from service.compat.responses.events import Item, OutputItems, ResponseStream, item_status
from service.compat.responses.items import Message, input_messages
from service.compat.responses.store import (
    ResponseName,
    Responses,
    ResponseStore,
    StoredResponse,
)
from service.errors import InvalidRequest, NotFound
from service.http.responses import (
    AUTH_ERRORS,
    CLUSTER_ERRORS,
    JSON,
    REDIRECT,
    declare_responses,
    to_json_bytes,
)
from service.rollouts.groups.logprob_tables import check_count

router = APIRouter(route_class=OpenAIRoute)
NAME = "resp_"
_STORED = as_openai(
    declare_responses({200: JSON, **REDIRECT}, *ROLLOUT_ERRORS, *CLUSTER_ERRORS, NotFound)
)
_CREATED = STREAM_RESPONSES | as_openai(declare_responses(REDIRECT, *AUTH_ERRORS, *CLUSTER_ERRORS))


@router.post("/v1/responses", responses=_CREATED, openapi_extra=request_body(ResponsesBody))
@requires_role("rollout")
async def create_response(call: Compat, store: Responses) -> Response:
    body = await call.read(ResponsesBody)
    body.check()
    adapter = call.resolve_adapter(body.model)
    check_count(call.server.engine.info, top_logprobs=body.top_logprobs)
    count_ignored_options(call.server, body.chat_template_kwargs or {}, body.reasoning_options())
    previous = await _previous(call, store, body.previous_response_id)
    chat_request = await asyncio.to_thread(body.chat_request, previous)
    prompt = await call.render(chat_request)
    request, tools = await asyncio.to_thread(
        lambda: (
            body.rollout_request([prompt], body, body.max_output_tokens, adapter),
            [_plain(tool) for tool in body.tools or ()],
        )
    )
    rollout = await call.start(
        request,
        cache_salt=body.cache_salt,
        num_top_logprobs=body.top_logprobs if body.includes(LOGPROBS) else None,
        stream_tokens=body.stream,
    )
    samples = ChatSamples(
        call=call,
        chat_request=chat_request,
        tool_choice=body.openai_tool_choice(),
        prompt=prompt,
        rollout=rollout,
        parallel_tool_calls=body.parallel_tool_calls,
    )
    builder = _ResponseBuilder(body, tools, samples, store)
    return builder.stream() if body.stream else await builder.response()


@router.get("/v1/responses/{response_id}", responses=_STORED)
@requires_role("rollout")
async def get_response(response_id: str, call: Compat, store: Responses) -> Response:
    await _check_local(call, response_id)
    stored = store.get(_name(call, response_id))
    if stored is None:
        raise NotFound("no response of this id is stored")
    return Response(stored.response, media_type=JSON[0])


@router.delete("/v1/responses/{response_id}", responses=_STORED)
@requires_role("rollout")
async def delete_response(response_id: str, call: Compat, store: Responses) -> dict[str, Any]:
    await _check_local(call, response_id)
    if not store.delete(_name(call, response_id)):
        raise NotFound("no response of this id is stored")
    return {"id": response_id, "object": "response", "deleted": True}


async def _previous(
    call: CompatRequest, store: ResponseStore, response_id: str | None
) -> Sequence[Message]:
    """Messages of the conversation that a request continues."""
    if response_id is None:
        return ()
    await _check_local(call, response_id)
    stored = store.get(_name(call, response_id))
    if stored is None:
        raise InvalidRequest.of_parameter(
            "previous_response_id",
            "no response of this id is stored (store: false, or dropped): send the whole input",
        )
    messages: list[Message] = await asyncio.to_thread(from_json, stored.messages)
    return messages


def _name(call: CompatRequest, response_id: str) -> ResponseName:
    return ResponseName(owner=call.owner, scope=call.caller.name, id=response_id)


async def _check_local(call: CompatRequest, response_id: str) -> None:
    """Redirect to the replica that has sampled the response, if it is another one.

    The responses of a session that was moved here are not stored anywhere any more.
    """
    replica_id = replica_id_of(response_id.removeprefix(NAME))
    if replica_id is not None and call.session_call is None:
        await call.server.cluster.check_local(replica_id)


class _ResponseBuilder:
    """Builds the response to one request, as a whole or as a stream, and stores it.

    `tools` are those of the request, as plain values.
    """

    def __init__(
        self,
        body: ResponsesBody,
        tools: list[dict[str, Any]],
        samples: ChatSamples,
        store: ResponseStore,
    ) -> None:
        self._body = body
        self._tools = tools
        self._samples = samples
        self._store = store
        self._id = NAME + samples.rollout.id
        self._created_at = unix_time()

    def stream(self) -> Response:
        stream = ResponseStream(
            samples=self._samples,
            head=self._head(),
            items=self._items(),
            to_logprobs=self._logprobs,
            finish=self._finish,
            has_logprobs=self._body.includes(LOGPROBS),
        )
        server, rollout = self._samples.call.server, self._samples.rollout
        return event_response(server, rollout, stream.events(), to_error=stream.failed, end=b"")

    async def response(self) -> Response:
        answer = await self._samples.call.wait(self._samples.rollout)
        [sample] = answer.groups[0].samples
        self._samples.check_ended(sample)
        parsed, items = await self._samples.message(sample), self._items()
        items.logprobs = await self._logprobs(sample)
        await asyncio.to_thread(
            lambda: [items.add(with_whole_calls(parsed)), items.end(item_status(sample))]
        )
        response = await self._finish(sample, items.items)
        return await self._samples.call.json_response(lambda: response)

    async def _finish(self, sample: SampleAnswer, items: list[Item]) -> Item:
        """The response after its last token; stored if requested."""
        response = self._ended(await self._samples.rollout.answer(), sample, items)
        if self._body.store:
            await self._keep(response)
        return response

    async def _keep(self, response: Item) -> None:
        conversation = self._conversation(response)
        stored = await self._samples.call.server.threads.run(
            "answers",
            0,
            lambda: StoredResponse(
                response=to_json_bytes(response), messages=to_json_bytes(conversation)
            ),
        )
        self._store.put(_name(self._samples.call, self._id), stored)

    def _conversation(self, response: Item) -> list[Message]:
        """Messages that a next request continues, without the instructions.

        The text that continues a message of the assistant becomes a part of that message.
        """
        request = self._samples.chat_request
        messages = list(map(dict, request.messages[bool(self._body.instructions) :]))
        added = input_messages(response["output"])
        if not request.continue_final_message or "tool_calls" in messages[-1]:
            return [*messages, *added]
        *messages, last = messages
        text = last["content"] + added[0]["content"]
        return [*messages, {**last, **added[0], "content": text}, *added[1:]]

    def _items(self) -> OutputItems:
        return OutputItems(
            name=self._samples.rollout.id,
            custom_tools=self._body.custom_tools,
            encrypts=self._body.includes(ENCRYPTED),
        )

    async def _logprobs(self, sample: SampleAnswer) -> list[dict[str, Any]]:
        """Logprobs of all tokens of the sample, if requested."""
        if not self._body.includes(LOGPROBS):
            return []
        return await self._samples.logprobs(sample, as_ids=False)

    def _head(self) -> Item:
        """The response before its first token, with the fields of the request."""
        body, sampling = self._body, self._samples.sampling
        head = {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": name_of(self._samples.call.server, body.model),
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": None if body.reasoning is None else body.reasoning.model_dump(),
            "service_tier": "default",
            "store": body.store,
            "temperature": sampling.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": _plain(body.tool_choice) or "auto",
            "tools": self._tools,
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }
        return {**head, "prompt_token_ids": self._samples.prompt} if body.return_token_ids else head

    def _ended(self, answer: RolloutAnswer, sample: SampleAnswer, items: list[Item]) -> Item:
        status = item_status(sample)
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        ids = {"token_ids": sample.token_ids} if self._body.return_token_ids else {}
        return {
            **self._head(),
            "status": status,
            "incomplete_details": incomplete,
            "output": items,
            "usage": _usage(answer, self._samples.num_reasoning_tokens),
            "weight_versions": weight_version_spans(sample),
            **(support_field(sample) if self._body.return_support else {}),
            **ids,
        }


def _plain(value: Any) -> Any:
    return value.model_dump(exclude_unset=True) if hasattr(value, "model_dump") else value


def _usage(answer: RolloutAnswer, num_reasoning_tokens: int) -> dict[str, Any]:
    counts = usage(answer)
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": counts["total_tokens"],
    }

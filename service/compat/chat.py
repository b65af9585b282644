"""POST /v1/chat/completions, as OpenAI defines it and vLLM extends it.

The model's own template makes tokens of a conversation, and the parsers that the engine was given
make tool calls and reasoning of a response.
"""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import Field

from coppice.wire.records import EndRecord, ProgressRecord, SampleRecord
from coppice.wire.rollouts import Policy, RolloutAnswer, SampleAnswer
from engine.protocol import Conversation, Reply
from service.access import Caller, needs
from service.answers import JSON, OF_BODY, OF_ENGINE_WORK, WHEN_READY, WITH_KEY, answers
from service.compat import events
from service.compat.bodies import ForeignModel, read_foreign
from service.compat.document import body_of
from service.compat.generate import logprobs
from service.compat.messages import members
from service.compat.running import (
    Work,
    answered,
    check_model,
    encoded,
    finish_reason,
    spans,
    start,
    usage,
)
from service.compat.sampling import Count, MaxTokens, SamplingFields, seed
from service.connection import NOBODY_READS
from service.errors import InvalidRequest
from service.rollout import Rollout
from service.routes.dependencies import ReadyServer
from service.server import Server

router = APIRouter()

SAMPLED = answers(
    {200: (*JSON, events.MEDIA_TYPE)}, *WITH_KEY, *WHEN_READY, *OF_BODY, *OF_ENGINE_WORK
)


class ChatMessage(ForeignModel):
    """Content is text, or parts that are all text."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def rendered(self) -> dict[str, Any]:
        given = self.model_dump(exclude_none=True, include=set(type(self).model_fields))
        return {**given, "content": self._text()}

    def _text(self) -> str:
        if not isinstance(self.content, list):
            return self.content or ""
        if any(not isinstance(part.get("text"), str) for part in self.content):
            raise InvalidRequest.of_parameter("messages", "only parts of type text are served")
        return "".join(part["text"] for part in self.content)


class Function(ForeignModel):
    """`parameters` is a JSON schema; the model's template shows it to the model."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(ForeignModel):
    type: Literal["function"] = "function"
    function: Function


class ChatBody(SamplingFields):
    """`logprobs`: of the sampled tokens, which is all there are."""

    model: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    tools: Annotated[list[Tool], Field(max_length=1024)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    n: Count = 1
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool = False
    stream: bool = False
    return_token_ids: bool = False
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    policy: Policy | None = None

    def conversation(self) -> Conversation:
        return Conversation(
            messages=[message.rendered() for message in self.messages],
            tools=[tool.model_dump(exclude_none=True) for tool in self.tools or ()],
            template_options=self.chat_template_kwargs,
            add_generation_prompt=self.add_generation_prompt,
        )


@router.post("/v1/chat/completions", responses=SAMPLED, openapi_extra=body_of(ChatBody))
@needs("rollout")
async def chat(request: Request, server: ReadyServer, caller: Caller) -> Response:
    body = await read_foreign(request, ChatBody, server)
    check_model(server, body.model)
    conversation = body.conversation()
    prompt = await server.prompts.conversation(conversation)
    work = Work(
        prompts=[prompt],
        n=body.n,
        sampling=body.sampling(body.max_completion_tokens or body.max_tokens),
        seed=seed(body.seed),
        priority=body.priority,
        policy=body.policy,
        cache_salt=body.cache_salt,
    )
    rollout = await start(server, caller, work)
    talk = Talk(server, body, conversation, prompt)
    if body.stream:
        return StreamingResponse(talk.events(rollout), media_type=events.MEDIA_TYPE)
    answer = await answered(request, server, rollout)
    if answer is None:
        return NOBODY_READS
    choices = [await talk.choice(sample) for sample in answer.groups[0].samples]
    return await encoded(lambda: talk.answer(answer, choices))


class Talk:
    """One request's conversation, and how its responses are written down."""

    def __init__(
        self, server: Server, body: ChatBody, conversation: Conversation, prompt: list[int]
    ) -> None:
        self._server = server
        self._body = body
        self._conversation = conversation
        self._prompt = prompt

    def answer(self, answer: RolloutAnswer, choices: list[dict[str, Any]]) -> dict[str, Any]:
        whole = {
            **self._head("chat.completion", answer.id),
            "choices": choices,
            "usage": usage(answer),
        }
        if self._body.return_token_ids:
            whole["prompt_token_ids"] = self._prompt
        return whole

    async def choice(self, sample: SampleAnswer, message_name: str = "message") -> dict[str, Any]:
        reply = await self._reply(sample)
        choice: dict[str, Any] = {
            "index": sample.index,
            message_name: _message(reply),
            "finish_reason": self._finish_reason(sample, reply),
            "logprobs": {"content": logprobs(sample)} if self._body.logprobs else None,
            "weight_versions": spans(sample),
        }
        if self._body.return_token_ids:
            choice["token_ids"] = sample.token_ids
        return choice

    async def events(self, rollout: Rollout) -> AsyncIterator[bytes]:
        """A choice is sent when it has ended: the engine hands out samples, not single tokens."""
        head = self._head("chat.completion.chunk", rollout.id)
        try:
            async for record in rollout.records():
                match record:
                    case SampleRecord(sample=sample):
                        choice = await self.choice(sample, "delta")
                        yield events.data({**head, "choices": [_numbered(choice)]})
                    case ProgressRecord():
                        yield events.KEEP_ALIVE
                    case EndRecord(problem=problem) if problem is not None:
                        yield events.data(members(problem))
            yield events.DONE
        finally:
            self._server.rollouts.left(rollout)

    async def _reply(self, sample: SampleAnswer) -> Reply:
        asked = self._conversation
        if self._body.tool_choice == "none":
            asked = replace(asked, tools=())
        return await self._server.prompts.reply(sample.token_ids, asked)

    def _finish_reason(self, sample: SampleAnswer, reply: Reply) -> str:
        reason = finish_reason(sample)
        return "tool_calls" if reply.tool_calls and reason == "stop" else reason

    def _head(self, kind: str, rollout_id: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{rollout_id}",
            "object": kind,
            "created": events.now(),
            "model": self._server.engine.facts.model,
        }


def _message(reply: Reply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in reply.tool_calls
        ]
    return message


def _numbered(choice: dict[str, Any]) -> dict[str, Any]:
    """In a stream every tool call says which one it is."""
    calls = choice["delta"].get("tool_calls", [])
    for index, call in enumerate(calls):
        call["index"] = index
    return choice

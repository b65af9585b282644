"""POST /v1/completions, as OpenAI defines it and vLLM extends it."""

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import Field

from coppice.wire.base import TokenIds
from coppice.wire.records import EndRecord, ProgressRecord, SampleRecord
from coppice.wire.rollouts import Policy, Prompt, RolloutAnswer, SampleAnswer
from service.access import Caller, needs
from service.answers import JSON, OF_BODY, OF_ENGINE_WORK, WHEN_READY, WITH_KEY, answers
from service.compat import events
from service.compat.bodies import read_foreign
from service.compat.document import body_of
from service.compat.messages import members
from service.compat.running import (
    Work,
    answered,
    check_model,
    encoded,
    finish_reason,
    spans,
    start,
    texts,
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

Text = Annotated[str, Field(min_length=1, max_length=16 * 2**20)]


class CompletionBody(SamplingFields):
    """`logprobs`: 0 for those of the sampled tokens, which is all there are."""

    model: str | None = None
    prompt: Text | list[Text] | TokenIds | list[TokenIds]
    n: Count = 1
    max_tokens: MaxTokens | None = 16
    logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    stream: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    policy: Policy | None = None


@router.post("/v1/completions", responses=SAMPLED, openapi_extra=body_of(CompletionBody))
@needs("rollout")
async def complete(request: Request, server: ReadyServer, caller: Caller) -> Response:
    body = await read_foreign(request, CompletionBody, server)
    check_model(server, body.model)
    prompts = [await server.prompts.token_ids(prompt) for prompt in _prompts(body)]
    work = Work(
        prompts=prompts,
        n=body.n,
        sampling=body.sampling(body.max_tokens),
        seed=seed(body.seed),
        priority=body.priority,
        policy=body.policy,
        cache_salt=body.cache_salt,
    )
    rollout = await start(server, caller, work)
    if body.stream:
        return StreamingResponse(
            _events(server, rollout, body, prompts), media_type=events.MEDIA_TYPE
        )
    answer = await answered(request, server, rollout)
    if answer is None:
        return NOBODY_READS
    written = await texts(server, answer)
    return await encoded(lambda: _answer(server, answer, body, prompts, written))


def _prompts(body: CompletionBody) -> list[Prompt]:
    given = body.prompt
    if isinstance(given, str):
        return [Prompt(text=given)]
    if not given:
        raise InvalidRequest.of_parameter("prompt", "is empty")
    if isinstance(given[0], int):
        return [Prompt.model_validate({"token_ids": given})]
    return [Prompt(text=p) if isinstance(p, str) else _tokens(p) for p in given]


def _tokens(given: object) -> Prompt:
    if not given:
        raise InvalidRequest.of_parameter("prompt", "holds an empty prompt")
    return Prompt.model_validate({"token_ids": given})


def _answer(
    server: Server,
    answer: RolloutAnswer,
    body: CompletionBody,
    prompts: list[list[int]],
    written: list[list[str]],
) -> dict[str, Any]:
    """Prompt by prompt, its n samples one after the other: clients count on the order."""
    choices = [
        _choice(group.index * body.n + sample.index, sample, text, body, prompts[group.index])
        for group, group_texts in zip(answer.groups, written, strict=True)
        for sample, text in zip(group.samples, group_texts, strict=True)
    ]
    return {**_head(server, answer.id), "choices": choices, "usage": usage(answer)}


def _head(server: Server, rollout_id: str) -> dict[str, Any]:
    return {
        "id": f"cmpl-{rollout_id}",
        "object": "text_completion",
        "created": events.now(),
        "model": server.engine.facts.model,
    }


def _choice(
    index: int, sample: SampleAnswer, text: str, body: CompletionBody, prompt: list[int]
) -> dict[str, Any]:
    choice = {
        "index": index,
        "text": text,
        "finish_reason": finish_reason(sample),
        "stop_reason": None,
        "logprobs": None if body.logprobs is None else _logprobs(sample),
        "prompt_logprobs": None,
        "weight_versions": spans(sample),
    }
    if body.return_token_ids:
        choice |= {"prompt_token_ids": prompt, "token_ids": sample.token_ids}
    return choice


def _logprobs(sample: SampleAnswer) -> dict[str, Any]:
    """Tokens are always named by their ids: text would not tell two of them apart."""
    return {
        "tokens": [f"token_id:{token}" for token in sample.token_ids],
        "token_logprobs": sample.logprobs,
        "top_logprobs": [None] * len(sample.token_ids),
        "text_offset": [],
    }


async def _events(
    server: Server, rollout: Rollout, body: CompletionBody, prompts: list[list[int]]
) -> AsyncIterator[bytes]:
    """A choice is sent when it has ended: the engine hands out samples, not single tokens."""
    head = _head(server, rollout.id)
    try:
        async for record in rollout.records():
            match record:
                case SampleRecord(group=group, sample=sample):
                    text = await server.prompts.text(sample.token_ids)
                    index = group * body.n + sample.index
                    choice = _choice(index, sample, text, body, prompts[group])
                    yield events.data({**head, "choices": [choice]})
                case ProgressRecord():
                    yield events.KEEP_ALIVE
                case EndRecord(problem=problem) if problem is not None:
                    yield events.data(members(problem))
        yield events.DONE
    finally:
        server.rollouts.left(rollout)

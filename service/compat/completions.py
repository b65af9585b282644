"""POST /v1/completions, as OpenAI defines it and vLLM extends it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from coppice.wire.base import TokenIds
from coppice.wire.rollouts import Prompt, RolloutAnswer, SampleAnswer
from service.access import Caller, needs
from service.compat import events, likeliest
from service.compat.bodies import Flag, read_foreign
from service.compat.document import body_of
from service.compat.openai_route import OpenAIRoute
from service.compat.running import (
    STREAMED,
    RequestFields,
    adapter_of,
    answered,
    encoded,
    finish_reason,
    name_of,
    spans,
    start,
    texts,
    tokens_of,
    usage,
)
from service.compat.sampling import MaxTokens, SamplingFields
from service.connection import NOBODY_READS
from service.errors import InvalidRequest
from service.rollout import Rollout
from service.routes.dependencies import ReadyServer
from service.server import Server

router = APIRouter(route_class=OpenAIRoute)

Text = Annotated[str, Field(min_length=1, max_length=16 * 2**20)]


class CompletionBody(SamplingFields, RequestFields, events.StreamFields):
    """`logprobs`: so many of the likeliest tokens beside each that is sampled."""

    prompt: Text | list[Text] | TokenIds | list[TokenIds]
    max_tokens: MaxTokens | None = 16
    logprobs: likeliest.Count | None = None
    prompt_logprobs: likeliest.Count | None = None
    return_tokens_as_token_ids: Flag = False
    add_special_tokens: bool = True


@router.post("/v1/completions", responses=STREAMED, openapi_extra=body_of(CompletionBody))
@needs("rollout")
async def complete(request: Request, server: ReadyServer, caller: Caller) -> Response:
    body = await read_foreign(request, CompletionBody, server)
    body.check_stream()
    adapter = adapter_of(server, body.model)
    likeliest.check(server, logprobs=body.logprobs, prompt_logprobs=body.prompt_logprobs)
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest.of_parameter("prompt_logprobs", "not in a stream")
    prompts = await tokens_of(server, lambda: _prompts(body))
    work = body.work(prompts, body, body.max_tokens, adapter, body.logprobs)
    scored = await likeliest.of_prompts(server, caller, work, body.prompt_logprobs)
    rollout = await start(server, caller, work)
    if body.stream:
        return _streamed(server, rollout, body, prompts)
    answer = await answered(request, server, rollout)
    if answer is None:
        return NOBODY_READS
    written = await texts(server, answer)
    said = Said(body=body, rollout=rollout, prompts=prompts, scored=scored)
    return await encoded(lambda: _answer(server, answer, said, written))


def _prompts(body: CompletionBody) -> list[Prompt]:
    given = body.prompt
    if isinstance(given, str):
        return _texts(body, [given])
    if not given:
        raise InvalidRequest.of_parameter("prompt", "is empty")
    if isinstance(given[0], int):
        return [Prompt.model_validate({"token_ids": given})]
    if isinstance(given[0], str):
        return _texts(body, given)
    return [_tokens(prompt) for prompt in given]


def _texts(body: CompletionBody, given: Sequence[object]) -> list[Prompt]:
    if not body.add_special_tokens:
        raise InvalidRequest.of_parameter(
            "add_special_tokens", "not served for text: get its ids from /tokenize and send these"
        )
    return [Prompt.model_validate({"text": text}) for text in given]


def _tokens(given: object) -> Prompt:
    if not given:
        raise InvalidRequest.of_parameter("prompt", "holds an empty prompt")
    return Prompt.model_validate({"token_ids": given})


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a choice is written from, beside its sample."""

    body: CompletionBody
    rollout: Rollout
    prompts: list[list[int]]
    scored: likeliest.Prompts

    def choice(self, group: int, sample: SampleAnswer, text: str) -> dict[str, Any]:
        """Prompt by prompt, its n samples one after the other: clients count on the order."""
        choice = {
            "index": group * self.body.n + sample.index,
            "text": text,
            "finish_reason": finish_reason(sample),
            "stop_reason": None,
            "logprobs": None if self.body.logprobs is None else self._logprobs(group, sample),
            "prompt_logprobs": likeliest.numbered(self.scored, group),
            "weight_versions": spans(sample),
        }
        if self.body.return_token_ids:
            choice |= {"prompt_token_ids": self.prompts[group], "token_ids": sample.token_ids}
        return choice

    def _logprobs(self, group: int, sample: SampleAnswer) -> dict[str, Any]:
        """Tokens are always named by their ids: text would not tell two of them apart."""
        places = likeliest.of_sample(self.rollout, group, sample.index)
        return {
            "tokens": [f"token_id:{token}" for token in sample.token_ids],
            "token_logprobs": sample.logprobs,
            "top_logprobs": likeliest.named(places) or [None] * len(sample.token_ids),
            "text_offset": [],
        }


def _answer(
    server: Server, answer: RolloutAnswer, said: Said, written: list[list[str]]
) -> dict[str, Any]:
    choices = [
        said.choice(group.index, sample, text)
        for group, group_texts in zip(answer.groups, written, strict=True)
        for sample, text in zip(group.samples, group_texts, strict=True)
    ]
    return {**_head(server, answer.id, said.body), "choices": choices, "usage": usage(answer)}


def _head(server: Server, rollout_id: str, body: CompletionBody) -> dict[str, Any]:
    return {
        "id": f"cmpl-{rollout_id}",
        "object": "text_completion",
        "created": events.now(),
        "model": name_of(server, body.model),
    }


def _streamed(
    server: Server, rollout: Rollout, body: CompletionBody, prompts: list[list[int]]
) -> Response:
    said = Said(body=body, rollout=rollout, prompts=prompts, scored=None)

    async def chunk(group: int, sample: SampleAnswer) -> dict[str, Any]:
        text = await server.prompts.text(sample.token_ids)
        return {"choices": [said.choice(group, sample, text)]}

    head = _head(server, rollout.id, body)
    return events.streamed(server, rollout, head, chunk, body.stream_options)

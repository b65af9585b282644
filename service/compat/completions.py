"""POST /v1/completions, as OpenAI defines it and vLLM extends it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from coppice.wire.base import TokenIds
from coppice.wire.rollouts import MAX_TOKENS, Prompt, RolloutAnswer, SampleAnswer
from engine.protocol import Place
from service.auth.access import Caller, needs
from service.compat import echo, events, token_logprobs, token_names
from service.compat.bodies import Flag, ListsOfTokenIds, Text, Texts, read_foreign
from service.compat.echo import EchoFields
from service.compat.openai_route import OpenAIRoute
from service.compat.openapi_document import body_of
from service.compat.rollout_adapter import (
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
from service.compat.sampling import SamplingFields
from service.http.disconnect import NOBODY_READS, while_connected
from service.http.errors import InvalidRequest
from service.rollouts.rollout import Rollout
from service.routes.dependencies import ReadyServer
from service.server import Server

router = APIRouter(route_class=OpenAIRoute)

Drawn = Sequence[tuple[int, SampleAnswer]]
"""Samples, each with the index of its group."""

NOTHING_SAMPLED: dict[str, Any] = {"token_ids": [], "logprobs": [], "versions": []}


class CompletionBody(EchoFields, SamplingFields, RequestFields, events.StreamFields):
    """`logprobs`: so many of the likeliest tokens beside each that is sampled."""

    prompt: Text | Texts | TokenIds | ListsOfTokenIds
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = 16
    return_tokens_as_token_ids: Flag = False
    add_special_tokens: bool = True


@router.post("/v1/completions", responses=STREAMED, openapi_extra=body_of(CompletionBody))
@needs("rollout")
async def complete(request: Request, server: ReadyServer, caller: Caller) -> Response:
    body = await read_foreign(request, CompletionBody, server)
    body.check_stream()
    adapter = adapter_of(server, body.model)
    token_logprobs.check(server, logprobs=body.logprobs, prompt_logprobs=body.prompt_logprobs)
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest.of_parameter("prompt_logprobs", "not in a stream")
    echo.check(body, n=body.n, stream=body.stream, max_tokens=body.max_tokens)
    prompts = await while_connected(request, tokens_of(server, lambda: _prompts(body)))
    if prompts is None:
        return NOBODY_READS
    # With max_tokens 0 vLLM samples one token as well, and leaves it out.
    most = body.max_tokens if body.max_tokens != 0 else 1
    work = body.work(prompts, body, most, adapter, body.logprobs)
    scored = await token_logprobs.of_prompts(server, caller, work, body.num_of_prompts)
    rollout = await start(server, caller, work)
    if body.stream:
        return _streamed(server, rollout, body, prompts)
    answer = await answered(request, server, rollout)
    if answer is None:
        return NOBODY_READS
    written = await texts(server, answer)
    said = Said(body=body, rollout=rollout, prompts=prompts, scored=scored)
    said = await said.named(server, [(g.index, s) for g in answer.groups for s in g.samples])
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
    scored: token_logprobs.Prompts
    name: token_names.Name = token_names.id_name
    echoed: list[str] | None = None

    async def named(self, server: Server, drawn: Drawn) -> "Said":
        """With the texts of tokens, and of prompts that are echoed."""
        name, echoed = self.name, None
        if self.body.logprobs is not None:
            as_ids = self.body.return_tokens_as_token_ids
            tokens = partial(self._tokens, drawn)
            name = await token_names.names(server.prompts, tokens, as_ids=as_ids)
        if self.body.echo:
            echoed = await echo.texts(server, self.body.prompt, self.prompts)
        return replace(self, name=name, echoed=echoed)

    def _tokens(self, drawn: Drawn) -> Iterator[int]:
        for group, sample in drawn:
            yield from token_names.tokens_of(sample, self._places(group, sample))
            if self.body.echo and self.scored is not None:
                yield from self.prompts[group]
                yield from token_names.tokens_of_places(self.scored[group])

    def choice(self, group: int, sample: SampleAnswer, text: str) -> dict[str, Any]:
        """Prompt by prompt, its n samples one after the other: clients count on the order."""
        if self.body.max_tokens == 0:
            text, sample = "", sample.model_copy(update=NOTHING_SAMPLED)
        choice = {
            "index": group * self.body.n + sample.index,
            "text": text if self.echoed is None else self.echoed[group] + text,
            "finish_reason": finish_reason(sample),
            "stop_reason": None,
            "logprobs": None if self.body.logprobs is None else self._logprobs(group, sample),
            "prompt_logprobs": None
            if self.body.echo
            else token_logprobs.numbered(self.scored, group),
            "weight_versions": spans(sample),
        }
        if self.body.return_token_ids:
            choice |= {"prompt_token_ids": self.prompts[group], "token_ids": sample.token_ids}
        return choice

    def _logprobs(self, group: int, sample: SampleAnswer) -> dict[str, Any]:
        places = [] if not sample.token_ids else self._places(group, sample)
        if not self.body.echo:
            return token_names.completion_logprobs(
                sample.token_ids, sample.logprobs, places, self.name
            )
        assert self.scored is not None, "logprobs of what is echoed were computed"
        prompt, before = self.prompts[group], self.scored[group]
        return token_names.completion_logprobs(
            [*prompt, *sample.token_ids],
            [*echo.own(prompt, before), *sample.logprobs],
            [*before, *(places or [[]] * len(sample.token_ids))],
            self.name,
        )

    def _places(self, group: int, sample: SampleAnswer) -> list[Place]:
        return token_logprobs.of_sample(self.rollout, group, sample.index)


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
        named = await said.named(server, [(group, sample)])
        text = await server.prompts.text(sample.token_ids)
        return {"choices": [named.choice(group, sample, text)]}

    head = _head(server, rollout.id, body)
    return events.streamed(server, rollout, head, chunk, body.stream_options)

"""POST /v1/completions with OpenAI's fields and vLLM's extensions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from coppice.wire.base import TokenIds
from coppice.wire.rollouts import MAX_TOKENS, Prompt, RolloutAnswer, SampleAnswer
from engine.types import TopLogprobs
from service.auth.access import Caller, requires_role
from service.compat import echo, events, token_logprobs, token_names
from service.compat.bodies import Flag, ListsOfTokenIds, Text, Texts, read_compat_body
from service.compat.echo import EchoFields
from service.compat.openai_route import OpenAIRoute
from service.compat.openapi_document import request_body
from service.compat.rollout_adapter import (
    STREAM_RESPONSES,
    CommonRequestFields,
    decode_samples,
    finish_reason,
    json_response,
    name_of,
    resolve_adapter,
    start,
    tokenize_prompts,
    usage,
    wait_for_answer,
    weight_version_spans,
)
from service.compat.sampling import SamplingFields
from service.http.errors import InvalidRequest
from service.http.exception_handlers import cancel_on_disconnect
from service.rollouts.rollout import Rollout
from service.routes.dependencies import ReadyServer
from service.server import Server

router = APIRouter(route_class=OpenAIRoute)

Drawn = Sequence[tuple[int, SampleAnswer]]
"""Samples with the index of their group."""

NOTHING_SAMPLED: dict[str, Any] = {"token_ids": [], "logprobs": [], "versions": []}


class CompletionBody(EchoFields, SamplingFields, CommonRequestFields, events.StreamFields):
    """Body of a completion request; `logprobs` is the number of top logprobs per sampled token."""

    prompt: Text | Texts | TokenIds | ListsOfTokenIds
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = 16
    return_tokens_as_token_ids: Flag = False
    add_special_tokens: bool = True


@router.post(
    "/v1/completions", responses=STREAM_RESPONSES, openapi_extra=request_body(CompletionBody)
)
@requires_role("rollout")
async def complete(request: Request, server: ReadyServer, caller: Caller) -> Response:
    body = await read_compat_body(request, CompletionBody, server)
    body.check_stream()
    adapter = resolve_adapter(server, body.model)
    token_logprobs.check(server, logprobs=body.logprobs, prompt_logprobs=body.prompt_logprobs)
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest.of_parameter("prompt_logprobs", "not in a stream")
    echo.check(body, n=body.n, stream=body.stream, max_tokens=body.max_tokens)
    prompts = await cancel_on_disconnect(request, tokenize_prompts(server, lambda: _prompts(body)))
    # With max_tokens 0 vLLM also samples one token and leaves it out of the answer.
    most = body.max_tokens if body.max_tokens != 0 else 1
    job = body.job(prompts, body, most, adapter, body.logprobs)
    prompt_scores = await token_logprobs.compute_prompt_logprobs(
        server, caller, job, body.num_of_prompts
    )
    rollout = await start(server, caller, job)
    if body.stream:
        return _stream_response(server, rollout, body, prompts)
    answer = await wait_for_answer(request, server, rollout)
    sample_texts = await decode_samples(server, answer)
    builder = CompletionBuilder(
        body=body, rollout=rollout, prompts=prompts, prompt_scores=prompt_scores
    )
    builder = await builder.as_completion_logprobs(
        server, [(g.index, s) for g in answer.groups for s in g.samples]
    )
    return await json_response(lambda: _answer(server, answer, builder, sample_texts))


def _prompts(body: CompletionBody) -> list[Prompt]:
    prompt_param = body.prompt
    if isinstance(prompt_param, str):
        return _texts(body, [prompt_param])
    if not prompt_param:
        raise InvalidRequest.of_parameter("prompt", "is empty")
    if isinstance(prompt_param[0], int):
        return [Prompt.model_validate({"token_ids": prompt_param})]
    if isinstance(prompt_param[0], str):
        return _texts(body, prompt_param)
    return [_tokens(prompt) for prompt in prompt_param]


def _texts(body: CompletionBody, prompt_param: Sequence[object]) -> list[Prompt]:
    if not body.add_special_tokens:
        raise InvalidRequest.of_parameter(
            "add_special_tokens", "not served for text: get its ids from /tokenize and send these"
        )
    return [Prompt.model_validate({"text": text}) for text in prompt_param]


def _tokens(prompt_param: object) -> Prompt:
    if not prompt_param:
        raise InvalidRequest.of_parameter("prompt", "holds an empty prompt")
    return Prompt.model_validate({"token_ids": prompt_param})


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionBuilder:
    """Inputs of a choice other than its sample."""

    body: CompletionBody
    rollout: Rollout
    prompts: list[list[int]]
    prompt_scores: token_logprobs.PromptLogprobs
    name: token_names.Name = token_names.id_name
    echoed: list[str] | None = None

    async def as_completion_logprobs(self, server: Server, drawn: Drawn) -> "CompletionBuilder":
        """Copy of the builder with the texts of all tokens and of echoed prompts."""
        name, echoed = self.name, None
        if self.body.logprobs is not None:
            as_ids = self.body.return_tokens_as_token_ids
            tokens = partial(self._tokens, drawn)
            name = await token_names.names(server.tokenizer, tokens, as_ids=as_ids)
        if self.body.echo:
            echoed = await echo.prompt_texts(server, self.body.prompt, self.prompts)
        return replace(self, name=name, echoed=echoed)

    def _tokens(self, drawn: Drawn) -> Iterator[int]:
        for group, sample in drawn:
            yield from token_names.sample_token_ids(sample, self._places(group, sample))
            if self.body.echo and self.prompt_scores is not None:
                yield from self.prompts[group]
                yield from token_names.top_token_ids(self.prompt_scores[group])

    def choice(self, group: int, sample: SampleAnswer, text: str) -> dict[str, Any]:
        """Choice of one sample.

        Its index counts the n samples of each prompt consecutively, in prompt order, as clients
        expect.
        """
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
            else token_logprobs.as_prompt_logprobs(self.prompt_scores, group),
            "weight_versions": weight_version_spans(sample),
        }
        if self.body.return_token_ids:
            choice |= {"prompt_token_ids": self.prompts[group], "token_ids": sample.token_ids}
        return choice

    def _logprobs(self, group: int, sample: SampleAnswer) -> dict[str, Any]:
        per_token = [] if not sample.token_ids else self._places(group, sample)
        if not self.body.echo:
            return token_names.completion_logprobs(
                sample.token_ids, sample.logprobs, per_token, self.name
            )
        assert self.prompt_scores is not None, "logprobs of what is echoed were computed"
        prompt, before = self.prompts[group], self.prompt_scores[group]
        return token_names.completion_logprobs(
            [*prompt, *sample.token_ids],
            [*echo.prompt_token_logprobs(prompt, before), *sample.logprobs],
            [*before, *(per_token or [[]] * len(sample.token_ids))],
            self.name,
        )

    def _places(self, group: int, sample: SampleAnswer) -> list[TopLogprobs]:
        return token_logprobs.sample_logprobs(self.rollout, group, sample.index)


def _answer(
    server: Server, answer: RolloutAnswer, builder: CompletionBuilder, sample_texts: list[list[str]]
) -> dict[str, Any]:
    choices = [
        builder.choice(group.index, sample, text)
        for group, texts_of_group in zip(answer.groups, sample_texts, strict=True)
        for sample, text in zip(group.samples, texts_of_group, strict=True)
    ]
    return {**_head(server, answer.id, builder.body), "choices": choices, "usage": usage(answer)}


def _head(server: Server, rollout_id: str, body: CompletionBody) -> dict[str, Any]:
    return {
        "id": f"cmpl-{rollout_id}",
        "object": "text_completion",
        "created": events.unix_time(),
        "model": name_of(server, body.model),
    }


def _stream_response(
    server: Server, rollout: Rollout, body: CompletionBody, prompts: list[list[int]]
) -> Response:
    builder = CompletionBuilder(body=body, rollout=rollout, prompts=prompts, prompt_scores=None)

    async def chunk(group: int, sample: SampleAnswer) -> dict[str, Any]:
        as_completion_logprobs = await builder.as_completion_logprobs(server, [(group, sample)])
        text = await server.tokenizer.text(sample.token_ids)
        return {"choices": [as_completion_logprobs.choice(group, sample, text)]}

    head = _head(server, rollout.id, body)
    return events.stream_response(server, rollout, head, chunk, body.stream_options)

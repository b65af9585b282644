"""POST /v1/completions with OpenAI's fields and vLLM's extensions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field

from coppice.wire.base import MAX_TOKENS, TokenIds
from coppice.wire.rollouts import Prompt, RolloutAnswer, SampleAnswer
from engine.types.samples import TopLogprobs
from service.auth.access import requires_role
from service.compat import logprobs
from service.compat.answer_fields import (
    finish_reason,
    name_of,
    support_field,
    unix_time,
    usage,
    weight_version_spans,
)
from service.compat.bodies import (
    Flag,
    ListsOfTokenIds,
    PromptTruncation,
    Text,
    Texts,
    request_body,
)
from service.compat.event_stream import STREAM_RESPONSES, StreamFields, stream_response
from service.compat.logprobs import NumLogprobs
from service.compat.openai.chunks import CompletionChunks
from service.compat.openai.echo import PromptEcho, check_echo, prompt_echo
from service.compat.openai_errors import OpenAIRoute
from service.compat.request import CommonRequestFields, Compat, CompatRequest, DecodedSample
from service.compat.sample_stream import NOTHING_SAMPLED
from service.compat.sampling_fields import SamplingFields
from service.errors import InvalidRequest
from service.rollouts.groups.logprob_tables import check_count
from service.rollouts.rollout import Rollout
from service.server import Server

router = APIRouter(route_class=OpenAIRoute)

IndexedSamples = Sequence[tuple[int, SampleAnswer]]
"""Pairs of a group's index and a sample of the group."""


class CompletionBody(SamplingFields, CommonRequestFields, PromptTruncation, StreamFields):
    """Request body of POST /v1/completions.

    `logprobs` is the number of top-k logprobs per sampled token. `echo` returns the prompt before
    each response, with logprobs; lm-eval uses it.
    """

    prompt: Text | Texts | TokenIds | ListsOfTokenIds
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = 16
    echo: Flag = False
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None
    return_tokens_as_token_ids: Flag = False
    add_special_tokens: bool = True

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of top-k logprobs per prompt token; None: prompt logprobs are not computed."""
        return self.logprobs if self.echo else self.prompt_logprobs

    def check(self) -> None:
        self.check_stream()
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest.of_parameter("prompt_logprobs", "not supported with stream: true")
        if self.echo and self.prompt_logprobs is not None:
            raise InvalidRequest.of_parameter(
                "prompt_logprobs", "not supported with echo: use logprobs"
            )
        if not self.echo and self.max_tokens == 0:
            raise InvalidRequest.of_parameter("max_tokens", "0 is allowed only with echo")


@router.post(
    "/v1/completions", responses=STREAM_RESPONSES, openapi_extra=request_body(CompletionBody)
)
@requires_role("rollout")
async def complete(call: Compat) -> Response:
    body = await call.read(CompletionBody)
    body.check()
    call.refuse_in_session(echo=body.echo, prompt_logprobs=body.prompt_logprobs)
    adapter = call.resolve_adapter(body.model)
    check_count(
        call.server.engine.info, logprobs=body.logprobs, prompt_logprobs=body.prompt_logprobs
    )
    prompts = await call.tokenize(lambda: _prompts(call, body))
    if body.echo:
        check_echo(prompts, n=body.n)
    # With max_tokens 0 vLLM also samples one token and leaves it out of the answer.
    most = body.max_tokens if body.max_tokens != 0 else 1
    request = body.rollout_request(prompts, body, most, adapter)
    prompt_scores = await logprobs.compute_prompt_logprobs(
        call, request, prompts, body.num_prompt_logprobs
    )
    rollout = await call.start(
        request,
        cache_salt=body.cache_salt,
        num_top_logprobs=body.logprobs,
        stream_tokens=body.stream,
    )
    echo = None
    if body.echo:
        is_truncated = body.truncate_prompt_tokens is not None
        echo = await prompt_echo(
            call.server, body.prompt, prompts, prompt_scores, is_truncated=is_truncated
        )
    builder = CompletionBuilder(
        body=body, rollout=rollout, prompts=prompts, prompt_scores=prompt_scores, echo=echo
    )
    if body.stream:
        return _stream_response(call.server, builder)
    answer = await call.wait(rollout)
    decoded = await call.decode(rollout, answer)
    named = await builder.with_token_names(
        call.server, [(group.index, sample) for group, sample, _ in decoded]
    )
    return await call.json_response(lambda: _answer(call.server, answer, named, decoded))


def _prompts(call: CompatRequest, body: CompletionBody) -> list[Prompt]:
    given = body.prompt
    if not given:
        raise InvalidRequest.of_parameter("prompt", "must not be empty")
    options = {
        "truncate_prompt_tokens": body.prompt_tokens_to_keep(call.server.engine.info),
        "truncation_side": body.truncation_side or "left",
    }
    is_one = isinstance(given, str) or isinstance(given[0], int)
    return [
        Prompt.model_validate({**_given_as(body, prompt), **options})
        for prompt in ([given] if is_one else given)
    ]


def _given_as(body: CompletionBody, prompt: object) -> dict[str, object]:
    if not isinstance(prompt, str):
        if not prompt:
            raise InvalidRequest.of_parameter("prompt", "must not contain an empty prompt")
        return {"token_ids": prompt}
    if not body.add_special_tokens:
        raise InvalidRequest.of_parameter(
            "add_special_tokens",
            "false is not supported for text: send the token ids that /tokenize returns",
        )
    return {"text": prompt}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionBuilder:
    """Builds the `choices` of a completions response from the samples of its rollout."""

    body: CompletionBody
    rollout: Rollout
    prompts: list[list[int]]
    prompt_scores: logprobs.PromptLogprobs
    echo: PromptEcho | None
    name: logprobs.TokenName = logprobs.id_name

    async def with_token_names(
        self, server: Server, samples: IndexedSamples
    ) -> "CompletionBuilder":
        """Copy of this builder with token names for logprobs."""
        if self.body.logprobs is None:
            return self
        as_ids = self.body.return_tokens_as_token_ids
        tokens = partial(self._tokens, samples)
        name = await logprobs.token_names(server.tokenizer, tokens, as_ids=as_ids)
        return replace(self, name=name)

    def _tokens(self, samples: IndexedSamples) -> Iterator[int]:
        for group, sample in samples:
            yield from logprobs.with_top_token_ids(sample.token_ids, self._places(group, sample))
        if self.echo is not None:
            for group in {group for group, _ in samples}:
                yield from self.echo.token_ids(group)

    def choice(self, group: int, sample: SampleAnswer, text: str) -> dict[str, Any]:
        """Element of the response's `choices` for one sample.

        Its index counts the n samples of each prompt consecutively, in prompt order, as clients
        expect.
        """
        if self.body.max_tokens == 0:
            text, sample = "", sample.model_copy(update=NOTHING_SAMPLED)
        choice = {
            "index": group * self.body.n + sample.index,
            "text": text if self.echo is None else self.echo.texts[group] + text,
            "finish_reason": finish_reason(sample),
            "stop_reason": sample.stop_reason,
            "logprobs": None if self.body.logprobs is None else self._logprobs(group, sample),
            "prompt_logprobs": None
            if self.body.echo
            else logprobs.as_prompt_logprobs(self.prompt_scores, group),
            "weight_versions": weight_version_spans(sample),
            **(support_field(sample) if self.body.return_support else {}),
        }
        if self.body.return_token_ids:
            choice |= {"prompt_token_ids": self.prompts[group], "token_ids": sample.token_ids}
        return choice

    def _logprobs(self, group: int, sample: SampleAnswer) -> dict[str, Any]:
        per_token = [] if not sample.token_ids else self._places(group, sample)
        sampled = (sample.token_ids, sample.logprobs, per_token, self.name)
        if self.echo is None:
            return logprobs.completion_logprobs(*sampled)
        return self.echo.logprobs(group, *sampled)

    def _places(self, group: int, sample: SampleAnswer) -> Sequence[TopLogprobs]:
        return logprobs.sample_logprobs(self.rollout, group, sample.index)


def _answer(
    server: Server,
    answer: RolloutAnswer,
    builder: CompletionBuilder,
    decoded: Sequence[DecodedSample],
) -> dict[str, Any]:
    choices = [builder.choice(group.index, sample, text) for group, sample, text in decoded]
    return {**_head(server, answer.id, builder.body), "choices": choices, "usage": usage(answer)}


def _head(server: Server, rollout_id: str, body: CompletionBody) -> dict[str, Any]:
    return {
        "id": f"cmpl-{rollout_id}",
        "object": "text_completion",
        "created": unix_time(),
        "model": name_of(server, body.model),
    }


def _stream_response(server: Server, builder: CompletionBuilder) -> Response:
    rollout, body = builder.rollout, builder.body
    chunks = CompletionChunks(
        server=server,
        sampling=rollout.groups[0].options.sampling,
        prompts=builder.prompts,
        n=body.n,
        with_logprobs=body.logprobs is not None,
        as_ids=body.return_tokens_as_token_ids,
        return_token_ids=body.return_token_ids,
        return_support=body.return_support,
        echo=builder.echo,
        leaves_out_tokens=body.max_tokens == 0,
    )
    head = _head(server, rollout.id, body)
    return stream_response(server, rollout, head, chunks.of_part, body.stream_options)

"""vLLM's routes for tokens: generate from token ids, tokenize and detokenize."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field

from coppice.wire.base import MAX_TOKENS, TokenIds
from coppice.wire.rollouts import RolloutAnswer, SampleAnswer
from engine.types.samples import TopLogprobs
from service.auth.access import requires_role
from service.compat import logprobs
from service.compat.answer_fields import finish_reason, support_field, usage, weight_version_spans
from service.compat.bodies import CompatModel, Flag, MaxTokens, request_body
from service.compat.event_stream import EVENTS_OR_JSON, StreamFields, stream_response
from service.compat.logprobs import NumLogprobs
from service.compat.openai.chat import ChatBody, ChatMessage, Tool
from service.compat.openai_errors import OpenAIRoute, as_openai
from service.compat.request import CommonRequestFields, Compat
from service.compat.sample_stream import SamplePart
from service.compat.sampling_fields import SamplingFields
from service.errors import AdapterNotFound, InvalidRequest, NoChatTemplate
from service.http.responses import (
    ADMIN_ERRORS,
    BODY_ERRORS,
    JSON,
    declare_responses,
    json_response,
)
from service.rollouts.groups.logprob_tables import check_count
from service.rollouts.rollout import Rollout
from service.server import Server

generation = APIRouter()
tokenization = APIRouter(route_class=OpenAIRoute)

MAX_BODY_BYTES = 2**20
"""Largest body of the tokenizer's routes: several times the longest contexts.

All callers share one tokenizer thread.
"""
TOKENIZE_RESPONSES = as_openai(
    declare_responses({200: JSON}, *ADMIN_ERRORS, *BODY_ERRORS, AdapterNotFound, NoChatTemplate)
)


class GenerateSampling(SamplingFields):
    """Sampling parameters of vLLM's POST /inference/v1/generate.

    `logprobs` 0 and 1 return the logprobs of the sampled tokens only, larger values also the top-k
    logprobs.
    """

    max_tokens: MaxTokens | None = None
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None

    @property
    def num_top_logprobs(self) -> int:
        """Number of top-k logprobs to return per sampled token; zero if `logprobs` is 1.

        A client that sends 1 reads the sampled token's logprob and requires that there is no other.
        """
        return self.logprobs if self.logprobs is not None and self.logprobs > 1 else 0


class GenerateBody(CommonRequestFields, StreamFields):
    """Request body of vLLM's POST /inference/v1/generate.

    Without max_tokens a response may fill the context.
    """

    token_ids: Annotated[TokenIds, Field(min_length=1, max_length=MAX_TOKENS)]
    sampling_params: GenerateSampling = GenerateSampling()
    request_id: Annotated[str, Field(max_length=256)] | None = None

    def check(self) -> None:
        self.check_stream()
        if self.stream and self.sampling_params.prompt_logprobs is not None:
            raise InvalidRequest.of_parameter("prompt_logprobs", "not supported with stream: true")


class TokenizeBody(CompatModel):
    """Request body of POST /tokenize: a text in `prompt`, or chat `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: Flag = False
    add_generation_prompt: bool = True
    continue_final_message: Flag = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=1024)] | None = None

    def chat(self) -> ChatBody:
        assert self.messages is not None, "the chat form"
        return ChatBody(
            messages=self.messages,
            tools=self.tools,
            chat_template_kwargs=self.chat_template_kwargs,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        )


class DetokenizeBody(CompatModel):
    model: str | None = None
    tokens: TokenIds


@generation.post(
    "/inference/v1/generate", responses=EVENTS_OR_JSON, openapi_extra=request_body(GenerateBody)
)
@requires_role("rollout")
async def generate(call: Compat) -> Response:
    body = await call.read(GenerateBody)
    body.check()
    adapter = call.resolve_adapter(body.model)
    params, prompts = body.sampling_params, [body.token_ids]
    check_count(
        call.server.engine.info, logprobs=params.logprobs, prompt_logprobs=params.prompt_logprobs
    )
    request = body.rollout_request(prompts, params, params.max_tokens, adapter)
    prompt_scores = await logprobs.compute_prompt_logprobs(
        call, request, prompts, params.prompt_logprobs
    )
    rollout = await call.start(
        request,
        cache_salt=body.cache_salt,
        num_top_logprobs=params.num_top_logprobs,
        stream_tokens=body.stream,
    )
    if body.stream:
        return _stream_response(call.server, body, rollout)
    answer = await call.wait(rollout)
    return await call.json_response(lambda: _answer(answer, body, rollout, prompt_scores))


@tokenization.post(
    "/tokenize", responses=TOKENIZE_RESPONSES, openapi_extra=request_body(TokenizeBody)
)
@requires_role("rollout")
async def tokenize(call: Compat) -> Response:
    body = await call.read(TokenizeBody, limit=MAX_BODY_BYTES)
    call.resolve_adapter(body.model)
    server = call.server
    tokens = await _tokens(server, body)
    answer = {
        "count": len(tokens),
        "max_model_len": server.engine.info.max_context_tokens,
        "tokens": tokens,
        "token_strs": await server.tokenizer.pieces(tokens) if body.return_token_strs else None,
    }
    return json_response(answer)


@tokenization.post(
    "/detokenize", responses=TOKENIZE_RESPONSES, openapi_extra=request_body(DetokenizeBody)
)
@requires_role("rollout")
async def detokenize(call: Compat) -> Response:
    body = await call.read(DetokenizeBody, limit=MAX_BODY_BYTES)
    call.resolve_adapter(body.model)
    info = call.server.engine.info
    if len(body.tokens) > info.max_context_tokens:
        raise InvalidRequest.of_parameter(
            "tokens", f"at most {info.max_context_tokens} tokens, the model's context length"
        )
    if max(body.tokens, default=0) >= info.vocab_size:
        raise InvalidRequest.of_parameter("tokens", f"token ids must be below {info.vocab_size}")
    return json_response({"prompt": await call.server.tokenizer.whole_text(body.tokens)})


def _answer(
    answer: RolloutAnswer,
    body: GenerateBody,
    rollout: Rollout,
    prompt_scores: logprobs.PromptLogprobs,
) -> dict[str, Any]:
    with_logprobs = body.sampling_params.logprobs is not None
    samples = answer.groups[0].samples
    return {
        "request_id": body.request_id or answer.id,
        "choices": [_choice(sample, with_logprobs, rollout) for sample in samples],
        "prompt_token_ids": body.token_ids if body.return_token_ids else None,
        "prompt_logprobs": logprobs.as_prompt_logprobs(prompt_scores, 0),
        "usage": usage(answer),
    }


def _choice(sample: SampleAnswer, with_logprobs: bool, rollout: Rollout) -> dict[str, Any]:
    per_token = logprobs.sample_logprobs(rollout, 0, sample.index)
    return {
        "index": sample.index,
        "token_ids": sample.token_ids,
        "finish_reason": finish_reason(sample),
        "stop_reason": sample.stop_reason,
        "logprobs": _content(sample.token_ids, sample.logprobs, per_token)
        if with_logprobs
        else None,
        "weight_versions": weight_version_spans(sample),
        **support_field(sample),
    }


def _stream_response(server: Server, body: GenerateBody, rollout: Rollout) -> Response:
    with_logprobs = body.sampling_params.logprobs is not None
    started = set[int]()

    async def chunks(part: SamplePart) -> list[dict[str, Any]]:
        sample = part.sample
        choice: dict[str, Any] = {
            "index": part.index,
            "token_ids": part.token_ids,
            "finish_reason": None if sample is None else finish_reason(sample),
            "stop_reason": None if sample is None else sample.stop_reason,
            "logprobs": await part.run(
                partial(_content, part.token_ids, part.logprobs, part.top_logprobs)
            )
            if with_logprobs
            else None,
            "weight_versions": None if sample is None else weight_version_spans(sample),
            **({} if sample is None else support_field(sample)),
        }
        # As in vLLM, once per request and not once per choice.
        prompt = {"prompt_token_ids": body.token_ids} if not started else {}
        started.add(part.index)
        return [{"choices": [choice], **(prompt if body.return_token_ids else {})}]

    head = {"request_id": body.request_id or rollout.id, "output_mode": "tokens"}
    return stream_response(server, rollout, head, chunks, body.stream_options)


def _content(
    token_ids: Sequence[int], sampled: Sequence[float], per_token: Sequence[TopLogprobs]
) -> dict[str, Any]:
    """Logprobs of sampled tokens, with each token id under the names `token` and `token_id`.

    vLLM 0.32 renamed `token` to `token_id`; this supports clients of either version.
    """
    return {"content": logprobs.entries(token_ids, sampled, per_token, _entry)}


def _entry(token: int, logprob: float) -> dict[str, Any]:
    return {"token": logprobs.id_name(token), "token_id": token, "logprob": logprob}


async def _tokens(server: Server, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest.of_parameter("prompt", "send either prompt or messages")
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        return await server.tokenizer.encoded(body.prompt, add_special_tokens=special)
    if body.add_special_tokens:
        raise InvalidRequest.of_parameter(
            "add_special_tokens",
            "not supported with messages: the chat template adds the special tokens",
        )
    chat_request = await asyncio.to_thread(lambda: body.chat().chat_request(server.engine.info))
    return await server.tokenizer.rendered(chat_request)

"""POST /inference/v1/generate: vLLM's way to send token ids and to get token ids."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from coppice.wire.base import TokenIds
from coppice.wire.rollouts import MAX_TOKENS, Policy, RolloutAnswer, SampleAnswer
from service.access import Caller, needs
from service.answers import JSON, OF_BODY, OF_ENGINE_WORK, WHEN_READY, WITH_KEY, answers
from service.compat.bodies import ForeignModel, read_foreign
from service.compat.document import body_of
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
from service.routes.dependencies import ReadyServer

router = APIRouter()

SAMPLED = answers({200: JSON}, *WITH_KEY, *WHEN_READY, *OF_BODY, *OF_ENGINE_WORK)


class GenerateSampling(SamplingFields):
    """`logprobs`: 0 or 1, and either way those of the sampled tokens alone."""

    n: Count = 1
    max_tokens: MaxTokens | None = None
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None


class GenerateBody(ForeignModel):
    """Without max_tokens a response may fill the context."""

    model: str | None = None
    token_ids: Annotated[TokenIds, Field(min_length=1, max_length=MAX_TOKENS)]
    sampling_params: GenerateSampling = GenerateSampling()
    request_id: Annotated[str, Field(max_length=256)] | None = None
    return_token_ids: bool = False
    stream: Literal[False] = False
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    policy: Policy | None = None


@router.post("/inference/v1/generate", responses=SAMPLED, openapi_extra=body_of(GenerateBody))
@needs("rollout")
async def generate(request: Request, server: ReadyServer, caller: Caller) -> Response:
    body = await read_foreign(request, GenerateBody, server)
    check_model(server, body.model)
    wanted = body.sampling_params
    work = Work(
        prompts=[body.token_ids],
        n=wanted.n,
        sampling=wanted.sampling(wanted.max_tokens),
        seed=seed(wanted.seed),
        priority=body.priority,
        policy=body.policy,
        cache_salt=body.cache_salt,
    )
    answer = await answered(request, server, await start(server, caller, work))
    if answer is None:
        return NOBODY_READS
    return await encoded(lambda: _answer(answer, body))


def _answer(answer: RolloutAnswer, body: GenerateBody) -> dict[str, Any]:
    with_logprobs = body.sampling_params.logprobs is not None
    return {
        "request_id": body.request_id or answer.id,
        "choices": [_choice(sample, with_logprobs) for sample in answer.groups[0].samples],
        "prompt_token_ids": body.token_ids if body.return_token_ids else None,
        "prompt_logprobs": None,
        "usage": usage(answer),
    }


def _choice(sample: SampleAnswer, with_logprobs: bool) -> dict[str, Any]:
    return {
        "index": sample.index,
        "token_ids": sample.token_ids,
        "finish_reason": finish_reason(sample),
        "logprobs": {"content": logprobs(sample)} if with_logprobs else None,
        "weight_versions": spans(sample),
    }


def logprobs(sample: SampleAnswer) -> list[dict[str, Any]]:
    """vLLM 0.32 renamed `token` to `token_id`; clients of either kind find theirs."""
    return [
        {"token": f"token_id:{token}", "token_id": token, "logprob": logprob, "top_logprobs": []}
        for token, logprob in zip(sample.token_ids, sample.logprobs, strict=True)
    ]

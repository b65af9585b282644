"""POST /inference/v1/generate: vLLM's way to send token ids and to get token ids."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from coppice.wire.base import TokenIds
from coppice.wire.rollouts import MAX_TOKENS, RolloutAnswer, SampleAnswer
from engine.protocol import Place
from service.auth.access import Caller, needs
from service.compat import token_logprobs
from service.compat.bodies import read_foreign
from service.compat.openapi_document import body_of
from service.compat.rollout_adapter import (
    SAMPLED,
    RequestFields,
    adapter_of,
    answered,
    encoded,
    finish_reason,
    spans,
    start,
    usage,
)
from service.compat.sampling import MaxTokens, SamplingFields
from service.http.disconnect import NOBODY_READS
from service.rollouts.rollout import Rollout
from service.routes.dependencies import ReadyServer

router = APIRouter()


class GenerateSampling(SamplingFields):
    """`logprobs`: 0 or 1 for those of the sampled tokens alone, more for the likeliest as well."""

    max_tokens: MaxTokens | None = None
    logprobs: token_logprobs.Count | None = None
    prompt_logprobs: token_logprobs.Count | None = None

    @property
    def num_likeliest(self) -> int:
        """A client that sends 1 reads the sampled token's, and checks that there is no other."""
        return self.logprobs if self.logprobs is not None and self.logprobs > 1 else 0


class GenerateBody(RequestFields):
    """Without max_tokens a response may fill the context."""

    token_ids: Annotated[TokenIds, Field(min_length=1, max_length=MAX_TOKENS)]
    sampling_params: GenerateSampling = GenerateSampling()
    request_id: Annotated[str, Field(max_length=256)] | None = None
    stream: Literal[False] | None = False


@router.post("/inference/v1/generate", responses=SAMPLED, openapi_extra=body_of(GenerateBody))
@needs("rollout")
async def generate(request: Request, server: ReadyServer, caller: Caller) -> Response:
    body = await read_foreign(request, GenerateBody, server)
    adapter = adapter_of(server, body.model)
    wanted = body.sampling_params
    token_logprobs.check(server, logprobs=wanted.logprobs, prompt_logprobs=wanted.prompt_logprobs)
    work = body.work([body.token_ids], wanted, wanted.max_tokens, adapter, wanted.num_likeliest)
    scored = await token_logprobs.of_prompts(server, caller, work, wanted.prompt_logprobs)
    rollout = await start(server, caller, work)
    answer = await answered(request, server, rollout)
    if answer is None:
        return NOBODY_READS
    return await encoded(lambda: _answer(answer, body, rollout, scored))


def _answer(
    answer: RolloutAnswer, body: GenerateBody, rollout: Rollout, scored: token_logprobs.Prompts
) -> dict[str, Any]:
    with_logprobs = body.sampling_params.logprobs is not None
    samples = answer.groups[0].samples
    return {
        "request_id": body.request_id or answer.id,
        "choices": [_choice(sample, with_logprobs, rollout) for sample in samples],
        "prompt_token_ids": body.token_ids if body.return_token_ids else None,
        "prompt_logprobs": token_logprobs.numbered(scored, 0),
        "usage": usage(answer),
    }


def _choice(sample: SampleAnswer, with_logprobs: bool, rollout: Rollout) -> dict[str, Any]:
    places = token_logprobs.of_sample(rollout, 0, sample.index)
    return {
        "index": sample.index,
        "token_ids": sample.token_ids,
        "finish_reason": finish_reason(sample),
        "logprobs": {"content": logprobs(sample, places)} if with_logprobs else None,
        "weight_versions": spans(sample),
    }


def logprobs(sample: SampleAnswer, places: Sequence[Place]) -> list[dict[str, Any]]:
    """vLLM 0.32 renamed `token` to `token_id`; clients of either kind find theirs."""
    others = [token_logprobs.listed(place) for place in places] or [[]] * len(sample.token_ids)
    return [
        {
            "token": f"token_id:{token}",
            "token_id": token,
            "logprob": logprob,
            "top_logprobs": more,
        }
        for token, logprob, more in zip(sample.token_ids, sample.logprobs, others, strict=True)
    ]

"""POST /inference/v1/generate: vLLM's route with token ids as input and output."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from coppice.wire.base import TokenIds
from coppice.wire.rollouts import MAX_TOKENS, RolloutAnswer, SampleAnswer
from engine.types import TopLogprobs
from service.auth.access import Caller, requires_role
from service.compat import token_logprobs
from service.compat.bodies import read_compat_body
from service.compat.openapi_document import request_body
from service.compat.rollout_adapter import (
    SAMPLE_RESPONSES,
    CommonRequestFields,
    finish_reason,
    json_response,
    resolve_adapter,
    start,
    usage,
    wait_for_answer,
    weight_version_spans,
)
from service.compat.sampling import MaxTokens, SamplingFields
from service.rollouts.rollout import Rollout
from service.routes.dependencies import ReadyServer

router = APIRouter()


class GenerateSampling(SamplingFields):
    """Sampling parameters.

    `logprobs` 0 and 1 return the logprobs of the sampled tokens only, larger values also the top-k
    logprobs.
    """

    max_tokens: MaxTokens | None = None
    logprobs: token_logprobs.Count | None = None
    prompt_logprobs: token_logprobs.Count | None = None

    @property
    def num_top_logprobs(self) -> int:
        """Number of top logprobs; zero for `logprobs` 1.

        A client that sends 1 reads the sampled token's logprob and requires that there is no other.
        """
        return self.logprobs if self.logprobs is not None and self.logprobs > 1 else 0


class GenerateBody(CommonRequestFields):
    """Body of a generate request; without max_tokens a response may fill the context."""

    token_ids: Annotated[TokenIds, Field(min_length=1, max_length=MAX_TOKENS)]
    sampling_params: GenerateSampling = GenerateSampling()
    request_id: Annotated[str, Field(max_length=256)] | None = None
    stream: Literal[False] | None = False


@router.post(
    "/inference/v1/generate", responses=SAMPLE_RESPONSES, openapi_extra=request_body(GenerateBody)
)
@requires_role("rollout")
async def generate(request: Request, server: ReadyServer, caller: Caller) -> Response:
    body = await read_compat_body(request, GenerateBody, server)
    adapter = resolve_adapter(server, body.model)
    params = body.sampling_params
    token_logprobs.check(server, logprobs=params.logprobs, prompt_logprobs=params.prompt_logprobs)
    job = body.job([body.token_ids], params, params.max_tokens, adapter, params.num_top_logprobs)
    prompt_scores = await token_logprobs.compute_prompt_logprobs(
        server, caller, job, params.prompt_logprobs
    )
    rollout = await start(server, caller, job)
    answer = await wait_for_answer(request, server, rollout)
    return await json_response(lambda: _answer(answer, body, rollout, prompt_scores))


def _answer(
    answer: RolloutAnswer,
    body: GenerateBody,
    rollout: Rollout,
    prompt_scores: token_logprobs.PromptLogprobs,
) -> dict[str, Any]:
    with_logprobs = body.sampling_params.logprobs is not None
    samples = answer.groups[0].samples
    return {
        "request_id": body.request_id or answer.id,
        "choices": [_choice(sample, with_logprobs, rollout) for sample in samples],
        "prompt_token_ids": body.token_ids if body.return_token_ids else None,
        "prompt_logprobs": token_logprobs.as_prompt_logprobs(prompt_scores, 0),
        "usage": usage(answer),
    }


def _choice(sample: SampleAnswer, with_logprobs: bool, rollout: Rollout) -> dict[str, Any]:
    per_token = token_logprobs.sample_logprobs(rollout, 0, sample.index)
    return {
        "index": sample.index,
        "token_ids": sample.token_ids,
        "finish_reason": finish_reason(sample),
        "logprobs": {"content": logprobs(sample, per_token)} if with_logprobs else None,
        "weight_versions": weight_version_spans(sample),
    }


def logprobs(sample: SampleAnswer, per_token: Sequence[TopLogprobs]) -> list[dict[str, Any]]:
    """Logprobs with the token under both names.

    vLLM 0.32 renamed `token` to `token_id`; this supports clients of either version.
    """
    others = [token_logprobs.as_chat_logprobs(candidates) for candidates in per_token] or [
        []
    ] * len(sample.token_ids)
    return [
        {
            "token": f"token_id:{token}",
            "token_id": token,
            "logprob": logprob,
            "top_logprobs": more,
        }
        for token, logprob, more in zip(sample.token_ids, sample.logprobs, others, strict=True)
    ]

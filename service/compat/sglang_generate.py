"""POST /generate: SGLang's sampling route, as used by slime and miles."""

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from coppice.wire.base import TokenIds
from coppice.wire.rollouts import GroupAnswer, Policy, Prompt, SampleAnswer
from service.auth.access import Caller, requires_role
from service.compat.bodies import CompatModel, Flag, ListsOfTokenIds, Text, Texts, read_compat_body
from service.compat.openapi_document import request_body
from service.compat.rollout_adapter import (
    SAMPLE_RESPONSES,
    SamplingJob,
    decode_samples,
    finish_reason,
    json_response,
    resolve_adapter,
    start,
    tokenize_prompts,
    wait_for_answer,
    weight_version_spans,
)
from service.compat.running_requests import RunningRequests
from service.compat.sampling import MaxTokens, SamplingFields, truncate_seed
from service.http.errors import InvalidRequest
from service.http.exception_handlers import cancel_on_disconnect
from service.routes.dependencies import ReadyServer

router = APIRouter()

Name = Annotated[str, Field(min_length=1, max_length=256)]


class SglangSampling(SamplingFields):
    """Sampling parameters; as in SGLang, max_new_tokens is 128 by default."""

    max_new_tokens: MaxTokens | None = 128
    sampling_seed: int | None = None


class SglangBody(CompatModel):
    """Body of a generate request.

    It has one prompt or a list of them, as text or as token ids. `lora_path` is the name of an
    adapter.
    """

    text: Text | Texts | None = None
    input_ids: TokenIds | ListsOfTokenIds | None = None
    sampling_params: SglangSampling = SglangSampling()
    rid: Name | None = None
    return_logprob: Flag = False
    stream: Annotated[Flag, Field(description="refused if true")] = False
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    extra_key: Name | None = None
    lora_path: Name | None = None
    policy: Policy | None = None

    @property
    def is_single(self) -> bool:
        """True if the answer is a single object: one prompt with one sample."""
        prompt_param = self.input_ids if self.text is None else self.text
        nested = isinstance(prompt_param, list) and not (
            prompt_param and isinstance(prompt_param[0], int)
        )
        return not nested and self.sampling_params.n == 1

    def prompts(self) -> list[Prompt]:
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequest.of_parameter("input_ids", "give either input_ids or text")
        if self.text is not None:
            return [
                Prompt(text=t) for t in ([self.text] if isinstance(self.text, str) else self.text)
            ]
        prompt_param: Any = self.input_ids
        rows = (
            prompt_param if prompt_param and isinstance(prompt_param[0], list) else [prompt_param]
        )
        if not all(rows):
            raise InvalidRequest.of_parameter("input_ids", "a prompt has no token")
        return [Prompt(token_ids=row) for row in rows]


@router.post("/generate", responses=SAMPLE_RESPONSES, openapi_extra=request_body(SglangBody))
@requires_role("rollout")
async def generate(
    request: Request, server: ReadyServer, caller: Caller, running: RunningRequests
) -> Response:
    body = await read_compat_body(request, SglangBody, server)
    if body.stream:
        raise InvalidRequest.of_parameter("stream", "not served here: use /v1/rollouts")
    prompts = await cancel_on_disconnect(request, tokenize_prompts(server, body.prompts))
    params = body.sampling_params
    job = SamplingJob(
        prompts=prompts,
        n=params.n,
        sampling=params.sampling(params.max_new_tokens),
        seed=truncate_seed(params.seed if params.sampling_seed is None else params.sampling_seed),
        priority=body.priority or 0,
        policy=body.policy,
        cache_salt=body.extra_key,
        adapter=resolve_adapter(server, body.lora_path),
    )
    rollout = await start(server, caller, job)
    with running.register(caller.name, body.rid or rollout.id, rollout):
        answer = await wait_for_answer(request, server, rollout)
    sample_texts = await decode_samples(server, answer)

    def build() -> object:
        rows = [
            _sample(body.rid or answer.id, group, sample, text, body.return_logprob)
            for group, texts_of_group in zip(answer.groups, sample_texts, strict=True)
            for sample, text in zip(group.samples, texts_of_group, strict=True)
        ]
        return rows[0] if body.is_single else rows

    return await json_response(build)


def _sample(
    rid: str, group: GroupAnswer, sample: SampleAnswer, text: str, with_logprobs: bool
) -> dict[str, Any]:
    meta = {
        "id": rid,
        "finish_reason": _finish_reason(sample),
        "prompt_tokens": group.num_prompt_tokens,
        "completion_tokens": len(sample.token_ids),
        "cached_tokens": group.num_cached_tokens,
        # None for a sample without tokens, which no version has generated.
        "weight_version": sample.versions[-1].version if sample.versions else None,
        "weight_versions": weight_version_spans(sample),
    }
    if with_logprobs:
        pairs = zip(sample.logprobs, sample.token_ids, strict=True)
        meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
    return {"text": text, "output_ids": sample.token_ids, "meta_info": meta}


def _finish_reason(sample: SampleAnswer) -> dict[str, Any]:
    reason = finish_reason(sample)
    match reason:
        case "stop":
            return {"type": "stop", "matched": sample.token_ids[-1]}
        case "length":
            return {"type": "length", "length": len(sample.token_ids)}
        case "abort":
            return {"type": "abort", "message": sample.finish_reason}
    return {"type": "abort", "message": "the engine failed"}

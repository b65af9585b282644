"""POST /generate: SGLang's sampling route, as used by slime and miles."""

from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field

from coppice.wire.base import TokenIds
from coppice.wire.rollouts import GroupAnswer, Prompt, SampleAnswer, WeightsConstraint
from service.auth.access import requires_role
from service.compat.bodies import (
    CompatModel,
    Flag,
    ListsOfTokenIds,
    MaxTokens,
    Name,
    Priority,
    SamplingFields,
    Text,
    Texts,
    request_body,
)
from service.compat.compat_request import (
    SAMPLE_RESPONSES,
    Compat,
    RunningRequests,
    finish_reason,
    large_json_response,
    rollout_request,
    weight_version_spans,
)
from service.http.errors import InvalidRequest

router = APIRouter()


class SglangSampling(SamplingFields):
    """SGLang's sampling parameters; as in SGLang, max_new_tokens is 128 by default."""

    max_new_tokens: MaxTokens | None = 128
    sampling_seed: int | None = None


class SglangBody(CompatModel):
    """Request body of SGLang's POST /generate.

    It has one prompt or a list of them, as text or as token ids. `lora_path` is the name of an
    adapter.
    """

    text: Text | Texts | None = None
    input_ids: TokenIds | ListsOfTokenIds | None = None
    sampling_params: SglangSampling = SglangSampling()
    rid: Name | None = None
    return_logprob: Flag = False
    stream: Annotated[Flag, Field(description="refused if true")] = False
    priority: Priority | None = None
    extra_key: Name | None = None
    lora_path: Name | None = None
    weights: WeightsConstraint | None = None

    @property
    def is_single(self) -> bool:
        """True if the response is one object and not a list: one prompt with one sample."""
        prompt_param = self.input_ids if self.text is None else self.text
        nested = isinstance(prompt_param, list) and not (
            prompt_param and isinstance(prompt_param[0], int)
        )
        return not nested and self.sampling_params.n == 1

    def prompts(self) -> list[Prompt]:
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequest.of_parameter("input_ids", "send either input_ids or text")
        if self.text is not None:
            return [
                Prompt(text=t) for t in ([self.text] if isinstance(self.text, str) else self.text)
            ]
        prompt_param: Any = self.input_ids
        rows = (
            prompt_param if prompt_param and isinstance(prompt_param[0], list) else [prompt_param]
        )
        if not all(rows):
            raise InvalidRequest.of_parameter("input_ids", "must not contain an empty prompt")
        return [Prompt(token_ids=row) for row in rows]


@router.post("/generate", responses=SAMPLE_RESPONSES, openapi_extra=request_body(SglangBody))
@requires_role("rollout")
async def generate(call: Compat, running: RunningRequests) -> Response:
    body = await call.read(SglangBody)
    if body.stream:
        raise InvalidRequest.of_parameter(
            "stream", "not supported on this route: use POST /v1/rollouts"
        )
    prompts = await call.tokenize(body.prompts)
    params = body.sampling_params
    request = rollout_request(
        prompts,
        params,
        seed=params.sampling_seed,
        max_tokens=params.max_new_tokens,
        adapter=call.resolve_adapter(body.lora_path),
        priority=body.priority or 0,
        weights=body.weights,
    )
    rollout = await call.start(request, cache_salt=body.extra_key, num_top_logprobs=None)
    with running.register(call.caller.name, body.rid or rollout.id, rollout):
        answer = await call.wait(rollout)
    decoded = await call.decode(answer)

    def build() -> object:
        rows = [
            _sample(body.rid or answer.id, group, sample, text, body.return_logprob)
            for group, sample, text in decoded
        ]
        return rows[0] if body.is_single else rows

    return await large_json_response(build)


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

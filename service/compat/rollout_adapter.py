"""Execution of other servers' requests as rollouts.

Prompts are converted to token ids before the rollout starts. The prompt token ids in an answer are
therefore exactly those that the engine received, and no token is ever decoded and encoded again.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Request, Response
from pydantic import Field, ValidationError

from coppice.wire.rollouts import (
    MAX_GROUPS,
    FinishReason,
    GroupRequest,
    Policy,
    Prompt,
    RolloutAnswer,
    RolloutRequest,
    SampleAnswer,
    Sampling,
)
from service.auth.keys import ApiKey
from service.compat.bodies import CompatModel, Flag
from service.compat.openai_route import as_openai
from service.compat.sampling import SamplingFields, truncate_seed
from service.http.bodies import fault
from service.http.errors import InvalidRequest
from service.http.exception_handlers import cancel_on_disconnect
from service.http.responses import (
    AUTH_ERRORS,
    BODY_ERRORS,
    ENGINE_ERRORS,
    JSON,
    READINESS_ERRORS,
    PartsResponse,
    declare_responses,
    value_parts,
)
from service.rollouts.options import GroupOptions
from service.rollouts.rollout import Rollout
from service.server import Server

FINISH_REASONS: dict[FinishReason, str] = {"stop": "stop", "length": "length", "error": "error"}
ABORTED = "abort"
ROLLOUT_ERRORS = (*AUTH_ERRORS, *READINESS_ERRORS, *BODY_ERRORS, *ENGINE_ERRORS)
SAMPLE_RESPONSES = declare_responses({200: JSON}, *ROLLOUT_ERRORS)
EVENT_STREAM = "text/event-stream"
STREAM_RESPONSES = as_openai(declare_responses({200: (*JSON, EVENT_STREAM)}, *ROLLOUT_ERRORS))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingJob:
    """One request in native terms: prompts and n samples of each."""

    prompts: Sequence[list[int]]
    n: int
    sampling: Sampling
    seed: int | None = None
    priority: int = 0
    policy: Policy | None = None
    cache_salt: str | None = None
    adapter: str | None = None
    num_top_logprobs: int = 0

    def request(self) -> RolloutRequest:
        groups = [
            GroupRequest(prompt=_checked(prompt), n=self.n, seed=self.seed)
            for prompt in self.prompts
        ]
        return RolloutRequest(
            groups=groups,
            sampling=self.sampling,
            policy=self.policy,
            priority=self.priority,
            adapter=self.adapter,
        )


def _checked(token_ids: list[int]) -> Prompt:
    """Prompt without another validation, which is slow on the event loop."""
    return Prompt.model_construct({"token_ids"}, token_ids=token_ids)


class CommonRequestFields(CompatModel):
    """Common fields of OpenAI's and vLLM's requests besides prompt and sampling parameters."""

    model: str | None = None
    return_token_ids: Flag = False
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    policy: Policy | None = None

    def job(
        self,
        prompts: Sequence[list[int]],
        fields: SamplingFields,
        max_tokens: int | None,
        adapter: str | None,
        num_top_logprobs: int | None,
    ) -> SamplingJob:
        return SamplingJob(
            prompts=prompts,
            n=fields.n,
            sampling=fields.sampling(max_tokens),
            seed=truncate_seed(fields.seed),
            priority=self.priority,
            policy=self.policy,
            cache_salt=self.cache_salt,
            adapter=adapter,
            num_top_logprobs=num_top_logprobs or 0,
        )


def namespaced_salt(caller: ApiKey, given: str | None) -> str | None:
    """Cache salt prefixed by the API key's name.

    No key can probe the cache of another one by guessing its salt.
    """
    return None if given is None else f"{caller.name}:{given}"


def resolve_adapter(server: Server, model: str | None) -> str | None:
    """Adapter that a model name denotes; None for the served model itself."""
    info = server.engine.info
    if model in (None, info.model, info.model_given):
        return None
    if not info.max_adapters:
        raise InvalidRequest.of_parameter("model", f"this server serves {info.model!r}")
    server.adapters.resolve(model)
    return model


def name_of(server: Server, model: str | None) -> str:
    """Model name in the answer; the served name if the request names the model's path."""
    info = server.engine.info
    return info.model if model is None or model == info.model_given else model


async def tokenize_prompts(
    server: Server, build_prompts: Callable[[], list[Prompt]]
) -> list[list[int]]:
    """Token ids of the prompts, validated against the limits of a rollout.

    The client's request format does not enforce these limits.
    """
    try:
        prompts = build_prompts()
    except ValidationError as error:
        raise fault(error) from error
    if not 0 < len(prompts) <= MAX_GROUPS:
        raise InvalidRequest(f"between 1 and {MAX_GROUPS} prompts are taken at once")
    return await server.tokenizer.all_token_ids(prompts)


async def start(server: Server, caller: ApiKey, job: SamplingJob) -> Rollout:
    options = GroupOptions(
        cache_salt=namespaced_salt(caller, job.cache_salt), num_top_logprobs=job.num_top_logprobs
    )
    return await server.rollouts.start(job.request(), owner=caller.name, options=options)


async def wait_for_answer(request: Request, server: Server, rollout: Rollout) -> RolloutAnswer:
    """Answer of the rollout; if the caller disconnects, the rollout is cancelled."""
    try:
        await cancel_on_disconnect(request, rollout.wait())
    finally:
        server.rollouts.on_disconnect(rollout)
    return await rollout.answer()


async def json_response(build: Callable[[], object]) -> Response:
    """JSON response that is serialized in a thread: a large one would block the event loop."""
    parts = await asyncio.to_thread(lambda: list(value_parts(build())))
    return PartsResponse(parts, media_type="application/json")


async def decode_samples(server: Server, answer: RolloutAnswer) -> list[list[str]]:
    """Texts of all samples by group."""
    return [
        [await server.tokenizer.text(sample.token_ids) for sample in group.samples]
        for group in answer.groups
    ]


def finish_reason(sample: SampleAnswer) -> str:
    return FINISH_REASONS.get(sample.finish_reason, ABORTED)


def weight_version_spans(sample: SampleAnswer) -> list[dict[str, Any]]:
    """Weights version of each range of sampled tokens."""
    return [span.model_dump() for span in sample.versions]


def usage(answer: RolloutAnswer) -> dict[str, Any]:
    usage_totals = answer.usage
    return {
        **token_counts(usage_totals.prompt_tokens, usage_totals.completion_tokens),
        "prompt_tokens_details": {
            "cached_tokens": sum(group.num_cached_tokens for group in answer.groups)
        },
    }


def token_counts(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }

"""SGLang's route POST /generate for sampling, as used by slime and miles."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Response

from coppice.wire.base import TokenIds
from coppice.wire.packed.results import EndRecord
from coppice.wire.rollouts import GroupAnswer, Prompt, SampleAnswer, WeightsConstraint
from service.auth.access import requires_role
from service.compat.answer_fields import finish_reason, support_field, weight_version_spans
from service.compat.bodies import (
    Flag,
    ListsOfTokenIds,
    MaxTokens,
    Name,
    Priority,
    SamplingBody,
    Text,
    Texts,
    request_body,
)
from service.compat.event_stream import EVENTS_OR_JSON, error_event, event_response, sse_event
from service.compat.request import Compat, CompatRequest, rollout_request
from service.compat.sample_stream import SamplePart, StreamedText, sample_parts
from service.compat.sampling_fields import SamplingFields
from service.compat.sglang.running_requests import RequestIds, RunningRequests
from service.errors import InvalidRequest
from service.rollouts.record_reader import SampleKey
from service.rollouts.rollout import Rollout
from service.server import Server

router = APIRouter()

EVERY_PART_TOKENS = 256
"""Up to this length of a sample, each part of it is an event of the stream."""
MIN_GROWTH = 1 / 32
MAX_QUIET_SECONDS = 1.0


class SglangSampling(SamplingFields):
    """SGLang's sampling parameters; as in SGLang, max_new_tokens is 128 by default."""

    max_new_tokens: MaxTokens | None = 128
    sampling_seed: int | None = None


class SglangBody(SamplingBody):
    """Request body of SGLang's POST /generate.

    It has one prompt or a list of them, as text or as token ids. `lora_path` is the name of an
    adapter.
    """

    text: Text | Texts | None = None
    input_ids: TokenIds | ListsOfTokenIds | None = None
    sampling_params: SglangSampling = SglangSampling()
    rid: Name | None = None
    return_logprob: Flag = False
    stream: Flag = False
    priority: Priority | None = None
    extra_key: Name | None = None
    lora_path: Name | None = None
    weights: WeightsConstraint | None = None
    return_support: Flag = False

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


@router.post("/generate", responses=EVENTS_OR_JSON, openapi_extra=request_body(SglangBody))
@requires_role("rollout")
async def generate(call: Compat, running: RunningRequests) -> Response:
    body = await call.read(SglangBody)
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
        return_support=body.return_support,
    )
    rollout = await call.start(
        request, cache_salt=body.extra_key, num_top_logprobs=None, stream_tokens=body.stream
    )
    if body.stream:
        return event_response(call.server, rollout, _events(call, running, body, rollout))
    with running.register(call.caller.name, body.rid or rollout.id, rollout):
        answer = await call.wait(rollout)
    decoded = await call.decode(rollout, answer)

    def build() -> object:
        rows = [
            {
                "text": text,
                "output_ids": sample.token_ids,
                "meta_info": _ended(body.rid or answer.id, group, sample, body.return_logprob),
            }
            for group, sample, text in decoded
        ]
        return rows[0] if body.is_single else rows

    return await call.json_response(build)


async def _events(
    call: CompatRequest, running: RequestIds, body: SglangBody, rollout: Rollout
) -> AsyncIterator[bytes]:
    """Server-sent events of the samples so far.

    As in SGLang by default, each event has all of the sample's text, tokens and logprobs. Tokens
    that are sampled while the client does not read are in one event. Events of a request with
    several samples have the sample's index.
    """
    rid = body.rid or rollout.id
    samples: dict[SampleKey, _RunningSample] = {}
    with running.register(call.caller.name, rid, rollout):
        async for part in sample_parts(rollout):
            match part:
                case SamplePart():
                    sample = samples.pop(part.key, None) or _RunningSample(call.server, rollout)
                    if part.sample is None:
                        samples[part.key] = sample
                    await sample.add(part)
                    if not sample.is_due(part):
                        continue
                    event = sample.event(rid, part, with_logprobs=body.return_logprob)
                    if not body.is_single:
                        event["index"] = part.group * body.sampling_params.n + part.index
                    yield await part.run(partial(sse_event, event))
                case EndRecord(problem=problem) if problem is not None:
                    yield error_event(call.server, problem)


class _RunningSample:
    """Text, tokens and logprobs of a sample so far, for the events of its stream.

    An event for each token would make the bytes of a stream quadratic in the sample's length. So a
    long sample has an event when it has grown by MIN_GROWTH, or after MAX_QUIET_SECONDS.
    """

    def __init__(self, server: Server, rollout: Rollout) -> None:
        self._groups = rollout.groups
        self._streamed = StreamedText(server, rollout.groups[0].options.sampling)
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._num_sent = 0
        self._clock = asyncio.get_running_loop().time
        self._sent_at = self._clock()

    async def add(self, part: SamplePart) -> None:
        self._text += await self._streamed.next(part)
        self._token_ids += part.token_ids
        self._logprobs += part.logprobs

    def is_due(self, part: SamplePart) -> bool:
        """True if the sample has an event now; the last part always has one."""
        has_grown = part.end - self._num_sent >= MIN_GROWTH * part.end
        is_quiet = self._clock() - self._sent_at >= MAX_QUIET_SECONDS
        is_due = part.sample is not None or part.end <= EVERY_PART_TOKENS or has_grown or is_quiet
        if is_due:
            self._num_sent, self._sent_at = part.end, self._clock()
        return is_due

    def event(self, rid: str, part: SamplePart, *, with_logprobs: bool) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": None if part.sample is None else _finish_reason(part.sample),
            "prompt_tokens": len(self._groups[part.group].options.prompt_token_ids),
            "completion_tokens": part.end,
            "weight_version": part.version,
        }
        if part.sample is not None:
            meta["weight_versions"] = weight_version_spans(part.sample)
            meta |= support_field(part.sample)
        if with_logprobs:
            meta["output_token_logprobs"] = _token_logprobs(self._logprobs, self._token_ids)
        return {"text": self._text, "output_ids": self._token_ids, "meta_info": meta}


def _ended(
    rid: str, group: GroupAnswer, sample: SampleAnswer, with_logprobs: bool
) -> dict[str, Any]:
    """Field `meta_info` of a finished sample."""
    meta = {
        "id": rid,
        "finish_reason": _finish_reason(sample),
        "prompt_tokens": group.num_prompt_tokens,
        "completion_tokens": len(sample.token_ids),
        "cached_tokens": group.num_cached_tokens,
        # None for a sample without tokens, which no version has generated.
        "weight_version": sample.versions[-1].version if sample.versions else None,
        "weight_versions": weight_version_spans(sample),
        **support_field(sample),
    }
    if with_logprobs:
        meta["output_token_logprobs"] = _token_logprobs(sample.logprobs, sample.token_ids)
    return meta


def _token_logprobs(logprobs: Sequence[float], token_ids: Sequence[int]) -> list[list[Any]]:
    return [[logprob, token, None] for logprob, token in zip(logprobs, token_ids, strict=True)]


def _finish_reason(sample: SampleAnswer) -> dict[str, Any]:
    reason = finish_reason(sample)
    match reason:
        case "stop":
            matched = sample.stop_reason
            return {"type": "stop", "matched": sample.token_ids[-1] if matched is None else matched}
        case "length":
            return {"type": "length", "length": len(sample.token_ids)}
        case "abort":
            return {"type": "abort", "message": sample.finish_reason}
    return {"type": "abort", "message": "the engine failed"}

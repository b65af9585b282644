"""SGLang's route POST /generate for sampling, as used by slime and miles."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import ValidationError
from pydantic_core import to_json

from coppice.wire.packed.results import EndRecord, SampleRecord, TokensRecord
from coppice.wire.problem_catalogue import Problem
from coppice.wire.rollouts import SampleAnswer
from service.auth.access import Caller, requires_role
from service.compat.bodies import request_body
from service.compat.errors import openai_error
from service.compat.event_stream import EventStreamResponse
from service.compat.serving.samples import finish_reason, weight_version_spans
from service.compat.sglang.body import SglangBody
from service.compat.sglang.running_requests import RequestIds, RunningRequests
from service.http.bodies import fault
from service.http.exception_handlers import cancel_on_disconnect, to_service_error
from service.http.responses import large_response
from service.rollouts.record_reader import SampleKey
from service.rollouts.rollout import Rollout
from service.routes.dependencies import ReadyServer
from service.server import Server

router = APIRouter()

EVERY_PART_TOKENS = 256
"""Up to this length of a sample, each part of it is an event of the stream."""
MIN_GROWTH = 1 / 32
MAX_QUIET_SECONDS = 1.0
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
Row = dict[str, Any]


@router.post("/generate", openapi_extra=request_body(SglangBody))
@requires_role("rollout")
async def generate(
    request: Request, server: ReadyServer, caller: Caller, running: RunningRequests
) -> Response:
    body = await server.bodies.read_json(request, SglangBody)
    body.check_extra()
    body.sampling_params.check_extra()
    try:
        prompts = body.prompts()
    except ValidationError as error:
        raise fault(error) from error
    tokens = await cancel_on_disconnect(request, server.tokenizer.all_token_ids(prompts))
    rollout = await server.rollouts.start(body.rollout(tokens, caller))
    rid = body.rid or rollout.id
    if body.stream:
        return EventStreamResponse(_events(server, running, body, rollout, (caller.name, rid)))
    with running.register(caller.name, rid, rollout):
        try:
            await cancel_on_disconnect(request, rollout.wait())
        finally:
            server.rollouts.on_disconnect(rollout)
    rows = await _rows(server, body, rollout, rid)
    return await large_response(
        server.threads, lambda: to_json(rows[0] if body.is_single else rows)
    )


async def _rows(server: Server, body: SglangBody, rollout: Rollout, rid: str) -> list[Row]:
    rows = list[Row]()
    for index, group in enumerate((await rollout.answer()).groups):
        for sample in group.samples:
            row = await _row(server, body, rollout, rid, index, sample)
            row["meta_info"]["cached_tokens"] = group.num_cached_tokens
            rows.append(row)
    return rows


async def _row(
    server: Server, body: SglangBody, rollout: Rollout, rid: str, group: int, sample: SampleAnswer
) -> Row:
    """A sample that has ended."""
    options = rollout.groups[group].options
    text = await server.tokenizer.response_text(
        sample.token_ids, sample.stop_reason, options.sampling
    )
    meta: dict[str, Any] = {
        "id": rid,
        "finish_reason": _finish_reason(sample),
        "prompt_tokens": len(options.prompt_token_ids),
        "completion_tokens": len(sample.token_ids),
        # None for a sample without tokens, which no version has generated.
        "weight_version": sample.versions[-1].version if sample.versions else None,
        "weight_versions": weight_version_spans(sample),
    }
    if sample.support is not None:
        meta["support"] = sample.support.model_dump()
    if body.return_logprob:
        meta["output_token_logprobs"] = _token_logprobs(sample.logprobs, sample.token_ids)
    return {"text": text, "output_ids": sample.token_ids, "meta_info": meta}


async def _events(
    server: Server, running: RequestIds, body: SglangBody, rollout: Rollout, name: tuple[str, str]
) -> AsyncGenerator[bytes, None]:
    """Server-sent events of a stream; a disconnect cancels the rollout.

    An error is an event as well, since the status is sent before the first event.
    """
    try:
        with running.register(*name, rollout):
            async for event in _sample_events(server, body, rollout, name[1]):
                yield await asyncio.to_thread(_sse_event, event)
    except Exception as error:
        failed = to_service_error(ExceptionGroup("a stream broke off", [error]))
        yield _sse_event(_error_event(server, failed.problem()))
    finally:
        server.rollouts.on_disconnect(rollout)
    yield b"data: [DONE]\n\n"


async def _sample_events(
    server: Server, body: SglangBody, rollout: Rollout, rid: str
) -> AsyncIterator[Row]:
    """Events of the samples so far.

    As in SGLang by default, each event has all of the sample's text, tokens and logprobs. Tokens
    that are sampled while the client does not read are in one event. Events of a request with
    several samples have the sample's index.
    """
    samples: dict[SampleKey, _RunningSample] = {}
    indexed = partial(_indexed, body)
    async for record in rollout.records(completes_samples=False):
        match record:
            case TokensRecord(group=group, index=index):
                sample = samples.setdefault((group, index), _RunningSample())
                if sample.add(record):
                    event = await sample.event(server, body, rollout, rid, record)
                    yield indexed(event, group, index)
            case SampleRecord(group=group, sample=ended):
                samples.pop((group, ended.index), None)
                event = await _row(server, body, rollout, rid, group, ended)
                yield indexed(event, group, ended.index)
            case EndRecord(problem=problem) if problem is not None:
                yield _error_event(server, problem)


def _indexed(body: SglangBody, event: Row, group: int, index: int) -> Row:
    number = group * body.sampling_params.n + index
    return event if body.is_single else {**event, "index": number}


class _RunningSample:
    """Tokens and logprobs of a sample so far, for the events of its stream.

    An event for each token would make the bytes of a stream quadratic in the sample's length. So a
    long sample has an event when it has grown by MIN_GROWTH, or after MAX_QUIET_SECONDS.
    """

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._num_sent = 0
        self._clock = asyncio.get_running_loop().time
        self._sent_at = self._clock()

    def add(self, record: TokensRecord) -> bool:
        """Add tokens; true if the sample has an event now."""
        self._token_ids += record.token_ids
        self._logprobs += record.logprobs
        length = len(self._token_ids)
        has_grown = length - self._num_sent >= MIN_GROWTH * length
        is_quiet = self._clock() - self._sent_at >= MAX_QUIET_SECONDS
        is_due = length <= EVERY_PART_TOKENS or has_grown or is_quiet
        if is_due:
            self._num_sent, self._sent_at = length, self._clock()
        return is_due

    async def event(
        self, server: Server, body: SglangBody, rollout: Rollout, rid: str, record: TokensRecord
    ) -> Row:
        """Event of the last record; its text has no incomplete character or stop string."""
        options = rollout.groups[record.group].options
        sampling = options.sampling
        text = await server.tokenizer.response_text(self._token_ids, None, sampling)
        excluded = () if sampling.include_stop_str_in_output else sampling.stop
        num_held = max(map(len, excluded), default=1) - 1
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": None,
            "prompt_tokens": len(options.prompt_token_ids),
            "completion_tokens": len(self._token_ids),
            "weight_version": record.versions[-1].version,
        }
        if body.return_logprob:
            meta["output_token_logprobs"] = _token_logprobs(self._logprobs, self._token_ids)
        shown = text[: max(len(text) - num_held, 0)].rstrip(INCOMPLETE)
        return {"text": shown, "output_ids": self._token_ids, "meta_info": meta}


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


def _error_event(server: Server, problem: Problem) -> Row:
    """Error event in the format of vLLM's ErrorResponse; counted in the metrics."""
    server.metrics.http.problems.labels(problem.code).inc()
    return {"error": openai_error(problem)}


def _sse_event(value: object) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"

"""Routes under /v1/rollouts: start, get and abort rollouts."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from coppice.wire.columns.token_columns import TABLES
from coppice.wire.packed.results import (
    GroupRecord,
    Record,
    SampleRecord,
    SegmentRecord,
    pack,
)
from coppice.wire.rollouts import RolloutAnswer, RolloutRequest, SampleAnswer, SegmentAnswer
from service.auth.access import Caller, requires_role
from service.cluster.idempotency_claim import IdempotencyClaim
from service.errors import (
    Draining,
    EngineGone,
    Forbidden,
    IdempotencyInProgress,
    IdempotencyMismatch,
    InvalidRequest,
    NotAcceptable,
    RedirectToReplica,
    ReplicaGone,
    RolloutNotFound,
)
from service.http.exception_handlers import cancel_on_disconnect
from service.http.params import (
    ResponseFormat,
    negotiate_format,
    prefers_async,
    resumed_rollout,
    wait_seconds,
)
from service.http.responses import (
    AUTH_ERRORS,
    BODY_ERRORS,
    CLUSTER_ERRORS,
    ENGINE_ERRORS,
    JSON,
    READINESS_ERRORS,
    REDIRECT,
    declare_responses,
    large_response,
    parts_of,
    to_json_bytes,
)
from service.rollouts.fairness import TimeSlice
from service.rollouts.request import NewRollout
from service.rollouts.rollout import Rollout
from service.routes.dependencies import ROLLOUT_LOCAL, AnyServer
from service.server import Server

router = APIRouter(prefix="/v1/rollouts")

INLINE_TOKENS = 2**12
"""Most tokens of a record that is converted to JSON on the event loop, in about 1 ms."""
IDEMPOTENCY_ERRORS = (IdempotencyInProgress, IdempotencyMismatch)
LOOKUP_ERRORS = (*CLUSTER_ERRORS, RolloutNotFound, Draining, EngineGone)
START_RESPONSES = declare_responses(
    {200: tuple(ResponseFormat), 202: JSON, **REDIRECT},
    *(*AUTH_ERRORS, *READINESS_ERRORS, *BODY_ERRORS, *ENGINE_ERRORS, *IDEMPOTENCY_ERRORS),
    *CLUSTER_ERRORS,
    *(NotAcceptable, RolloutNotFound),
)
GET_RESPONSES = declare_responses(
    {200: tuple(ResponseFormat), 202: JSON, **REDIRECT},
    *AUTH_ERRORS,
    *LOOKUP_ERRORS,
    NotAcceptable,
    InvalidRequest,
)
ABORT_RESPONSES = declare_responses(
    {200: {ResponseFormat.JSON, ResponseFormat.PACKED}, **REDIRECT},
    *AUTH_ERRORS,
    *LOOKUP_ERRORS,
    NotAcceptable,
)


@router.post("", responses=START_RESPONSES)
@requires_role("rollout")
async def start(request: Request, server: AnyServer, caller: Caller) -> Response:
    """Start a rollout.

    With an idempotency key the request is served during a drain too, because it may be a retry for
    a rollout that is already running. With `resume`, the caller receives the rollout with this id,
    which a draining replica has moved here.
    """
    headers = request.headers
    key = headers.get("idempotency-key")
    moved_id = resumed_rollout(request.query_params)
    if key is None and moved_id is None:
        server.readiness.check_ready()
    else:
        server.readiness.check_serving()
    response_format = negotiate_format(headers.get("accept"))
    respond_async = prefers_async(",".join(headers.getlist("prefer")))
    body = await server.bodies.read_packable(request, RolloutRequest)
    if body.kv is not None and "kv" not in caller.roles:
        raise Forbidden("the API key lacks the role kv, which the export of prompt KV requires")
    is_streamed = body.stream or response_format is ResponseFormat.NDJSON
    if body.stream_tokens and not (is_streamed or respond_async):
        raise InvalidRequest.of_parameter("stream_tokens", "needs stream: true")
    claim = None
    if key is not None:
        fingerprint = await server.bodies.fingerprint(request, body)
        claim = IdempotencyClaim.of(caller.name, key, fingerprint)
    if moved_id is not None:
        rollout = _moved_rollout(server, moved_id, caller.name)
        return await _respond(request, server, rollout, response_format, is_streamed=is_streamed)
    can_move = respond_async or claim is not None or not is_streamed
    starting = server.rollouts.start(
        NewRollout.of(body, owner=caller.name, can_move=can_move),
        detached=respond_async,
        claim=claim,
        prompt_scorer=server.scoring.prompt_logprobs,
    )
    rollout = await cancel_on_disconnect(request, starting)
    if respond_async:
        return _accepted(rollout, {"Preference-Applied": "respond-async"})
    return await _respond(request, server, rollout, response_format, is_streamed=is_streamed)


@router.get("/{rollout_id}", responses=GET_RESPONSES, dependencies=[ROLLOUT_LOCAL])
@requires_role("rollout")
async def get_rollout(
    rollout_id: str, request: Request, server: AnyServer, caller: Caller
) -> Response:
    """Get a rollout's result, or its progress if it has not ended.

    Waits for the end of a running rollout for up to `wait` seconds. With NDJSON, the records are
    streamed instead.
    """
    response_format = negotiate_format(request.headers.get("accept"))
    seconds = wait_seconds(request.query_params)
    rollout = server.rollouts.get(rollout_id, owner=caller.name)
    if response_format is ResponseFormat.NDJSON:
        return _stream(rollout, _lines(server, rollout))
    if not rollout.ended:
        try:
            async with asyncio.timeout(seconds):
                await cancel_on_disconnect(request, rollout.wait())
        except TimeoutError:
            return _accepted(rollout, {})
    return await _answer(server, rollout, response_format)


@router.delete("/{rollout_id}", responses=ABORT_RESPONSES, dependencies=[ROLLOUT_LOCAL])
@requires_role("rollout")
async def abort(rollout_id: str, request: Request, server: AnyServer, caller: Caller) -> Response:
    """Abort a rollout.

    The tokens sampled so far are returned here and to the request that started the rollout.
    """
    response_format = negotiate_format(request.headers.get("accept"))
    rollout = server.rollouts.get(rollout_id, owner=caller.name)
    await server.rollouts.cancel(rollout)
    return await _answer(
        server,
        rollout,
        ResponseFormat.JSON if response_format is ResponseFormat.NDJSON else response_format,
    )


def _moved_rollout(server: Server, rollout_id: str, owner: str) -> Rollout:
    try:
        return server.rollouts.get(rollout_id, owner=owner)
    except RolloutNotFound:
        raise ReplicaGone() from None  # this replica has been restarted since the move


async def _respond(
    request: Request,
    server: Server,
    rollout: Rollout,
    response_format: ResponseFormat,
    *,
    is_streamed: bool,
) -> Response:
    """Response to the request that started a rollout, or a redirect if the rollout was moved."""
    if is_streamed:
        return _stream(rollout, _lines_until_disconnect(server, rollout))
    try:
        return await _answer_until_disconnect(request, server, rollout, response_format)
    except RedirectToReplica as moved:
        raise RedirectToReplica(moved.url, query=f"resume={rollout.id}") from None


async def _answer_until_disconnect(
    request: Request, server: Server, rollout: Rollout, response_format: ResponseFormat
) -> Response:
    try:
        await cancel_on_disconnect(request, rollout.wait())
    finally:
        server.rollouts.on_disconnect(rollout)
    return await _answer(server, rollout, response_format)


def _stream(rollout: Rollout, lines: AsyncIterator[bytes]) -> Response:
    return StreamingResponse(lines, media_type=ResponseFormat.NDJSON, headers=_headers(rollout))


async def _lines_until_disconnect(server: Server, rollout: Rollout) -> AsyncIterator[bytes]:
    """NDJSON lines of a rollout, for the HTTP request that started the rollout.

    A disconnect of this request cancels the rollout unless the rollout is detached; disconnects of
    other readers do not.
    """
    try:
        async for line in _lines(server, rollout):
            yield line
    finally:
        server.rollouts.on_disconnect(rollout)


async def _lines(server: Server, rollout: Rollout) -> AsyncIterator[bytes]:
    turn = TimeSlice()
    async for record in rollout.records():
        if _is_large(record):
            line = await server.threads.run("answers", 0, partial(_line, record))
        else:
            line = _line(record)
        for part in parts_of(line):
            yield part
            await turn.pause()
    rollout.awaits_fetch = False


async def _answer(server: Server, rollout: Rollout, response_format: ResponseFormat) -> Response:
    """HTTP response with the result of a rollout, in the negotiated format."""
    rollout.awaits_fetch = False  # the shutdown waits for responses in progress
    answer = await rollout.answer()
    return await large_response(
        server.threads,
        lambda: _encode(answer, response_format),
        media_type=response_format,
        headers=_headers(rollout),
    )


def _encode(answer: RolloutAnswer, response_format: ResponseFormat) -> bytes:
    return pack(answer) if response_format is ResponseFormat.PACKED else to_json_bytes(answer)


def _line(record: Record) -> bytes:
    return record.model_dump_json(exclude_none=True).encode() + b"\n"


def _is_large(record: Record) -> bool:
    """True if the conversion of a record to JSON may take long."""
    if isinstance(record, GroupRecord):
        head = record.group
        return head.prompt_logprobs is not None or head.prompt_token_ids is not None
    if isinstance(record, SampleRecord):
        return _has_many_values(record.sample)
    return isinstance(record, SegmentRecord) and _has_many_values(record.segment)


def _has_many_values(part: SampleAnswer | SegmentAnswer) -> bool:
    tables = (getattr(part, name, None) for name in TABLES)
    return len(part.token_ids) > INLINE_TOKENS or any(table is not None for table in tables)


def _accepted(rollout: Rollout, headers: dict[str, str]) -> Response:
    rollout.awaits_fetch = True
    progress: BaseModel = rollout.progress()
    location = {"Location": f"/v1/rollouts/{rollout.id}"}
    return Response(
        progress.model_dump_json(),
        status_code=202,
        media_type=ResponseFormat.JSON,
        headers=_headers(rollout) | location | headers,
    )


def _headers(rollout: Rollout) -> dict[str, str]:
    return {"Coppice-Rollout-Id": rollout.id}

"""Routes under /v1/sessions: create, finish and cancel agent sessions, and get their trees."""

from collections.abc import AsyncIterator
from functools import partial

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from coppice.wire.sessions import (
    SessionFinishRequest,
    SessionRecord,
    SessionsAnswer,
    SessionsRequest,
)
from service.auth.access import Caller, requires_role
from service.cluster.idempotency_claim import IdempotencyClaim
from service.errors import (
    ClusterUnavailable,
    Draining,
    EngineGone,
    IdempotencyInProgress,
    IdempotencyMismatch,
    InvalidRequest,
    QuotaExceeded,
    SessionClosed,
    SessionNotFound,
)
from service.http.params import ResponseFormat, stream_position
from service.http.responses import (
    AUTH_ERRORS,
    BODY_ERRORS,
    CLUSTER_ERRORS,
    JSON,
    READINESS_ERRORS,
    REDIRECT,
    declare_responses,
    json_response,
    large_response,
    parts_of,
    to_json_bytes,
)
from service.routes.dependencies import SESSION_LOCAL, AnyServer
from service.server import Server
from service.sessions.session import Session
from service.sessions.store import StreamItem

router = APIRouter(prefix="/v1/sessions")

LOOKUP_ERRORS = (*AUTH_ERRORS, *CLUSTER_ERRORS, SessionNotFound)
CREATE_RESPONSES = declare_responses(
    {200: JSON, **REDIRECT},
    *(*AUTH_ERRORS, *READINESS_ERRORS, *BODY_ERRORS, QuotaExceeded, ClusterUnavailable),
    *(IdempotencyInProgress, IdempotencyMismatch, SessionNotFound),
)
STREAM_RESPONSES = declare_responses(
    {200: [ResponseFormat.NDJSON], **REDIRECT}, *LOOKUP_ERRORS, InvalidRequest
)
GET_RESPONSES = declare_responses({200: JSON, **REDIRECT}, *LOOKUP_ERRORS)
END_RESPONSES = declare_responses({200: JSON, **REDIRECT}, *LOOKUP_ERRORS, Draining)
FINISH_RESPONSES = declare_responses(
    {200: JSON, **REDIRECT}, *LOOKUP_ERRORS, *BODY_ERRORS, Draining, EngineGone, SessionClosed
)


@router.post("", responses=CREATE_RESPONSES)
@requires_role("rollout")
async def create(request: Request, server: AnyServer, caller: Caller) -> Response:
    """Create the sessions of one group; with an idempotency key, find those of the first attempt.

    The answer has the sessions' keys, so it must not be cached by anything between.
    """
    key = request.headers.get("idempotency-key")
    if key is None:
        server.readiness.check_ready()
    else:
        server.readiness.check_serving()
    body = await server.bodies.read_json(request, SessionsRequest)
    claim = None
    if key is not None:
        fingerprint = await server.bodies.fingerprint(request, body)
        claim = IdempotencyClaim.of(caller.name, key, fingerprint, "sessions")
    answer: SessionsAnswer = await server.sessions.create(body, owner=caller.name, claim=claim)
    response = json_response(answer)
    response.headers["Cache-Control"] = "no-store"
    return response


@router.get("", responses=STREAM_RESPONSES)
@requires_role("rollout")
async def stream(request: Request, server: AnyServer, caller: Caller) -> Response:
    """Stream ended sessions as NDJSON, from the one after the sequence `after` on."""
    position = stream_position(request.query_params)
    if position.group is not None:
        await server.sessions.check_group_local(position.group, owner=caller.name)
    if position.replica is not None:
        await server.cluster.check_local(position.replica)
    items = server.sessions.stream(caller.name, position.group, position.after)
    return StreamingResponse(_lines(server, items), media_type=ResponseFormat.NDJSON)


@router.get("/{session_id}", responses=GET_RESPONSES, dependencies=[SESSION_LOCAL])
@requires_role("rollout")
async def get_session(session_id: str, server: AnyServer, caller: Caller) -> Response:
    session = server.sessions.get(session_id, owner=caller.name)
    await session.wait_until_recorded()
    return json_response(session.status(server.sessions.now()))


@router.get("/{session_id}/tree", responses=GET_RESPONSES, dependencies=[SESSION_LOCAL])
@requires_role("rollout")
async def get_tree(session_id: str, server: AnyServer, caller: Caller) -> Response:
    """Get the trees of a session so far."""
    session = server.sessions.get(session_id, owner=caller.name)
    await session.wait_until_recorded()
    return await _answer(server, session)


@router.post("/{session_id}/finish", responses=FINISH_RESPONSES, dependencies=[SESSION_LOCAL])
@requires_role("rollout")
async def finish(session_id: str, request: Request, server: AnyServer, caller: Caller) -> Response:
    """Finish a session with its rewards; calls that still run are aborted."""
    body = await server.bodies.read_json(request, SessionFinishRequest)
    session = server.sessions.get(session_id, owner=caller.name)
    await server.sessions.finish(session, body)
    return await _answer(server, session)


@router.delete("/{session_id}", responses=END_RESPONSES, dependencies=[SESSION_LOCAL])
@requires_role("rollout")
async def cancel(session_id: str, server: AnyServer, caller: Caller) -> Response:
    """Cancel a session, and get its trees; a session that has ended remains as it is."""
    session = server.sessions.get(session_id, owner=caller.name)
    await server.sessions.cancel(session)
    return await _answer(server, session)


async def _answer(server: Server, session: Session) -> Response:
    answer = await session.answer()
    return await large_response(server.threads, lambda: to_json_bytes(answer))


async def _lines(server: Server, items: AsyncIterator[StreamItem]) -> AsyncIterator[bytes]:
    async for item in items:
        if not isinstance(item, Session):
            yield item.model_dump_json().encode() + b"\n"
            continue
        record = SessionRecord(session=await item.answer())
        for part in parts_of(await server.threads.run("answers", 0, partial(_line, record))):
            yield part


def _line(record: SessionRecord) -> bytes:
    return to_json_bytes(record) + b"\n"

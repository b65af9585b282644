"""Routes under /v1/moves: another replica sends rollouts and sessions to this one."""

from fastapi import APIRouter, Request, Response

from coppice.wire.moves import MoveAnswer, MovedRollout
from coppice.wire.session_moves import MovedSessions
from service.auth.access import requires_role
from service.errors import (
    AdapterNotFound,
    ClusterUnavailable,
    IdempotencyInProgress,
    IdempotencyMismatch,
    Overloaded,
    QuotaExceeded,
    RolloutNotFound,
    SessionNotFound,
    VersionConflict,
    VersionSuperseded,
    VersionUnavailable,
)
from service.http.exception_handlers import cancel_on_disconnect
from service.http.responses import (
    AUTH_ERRORS,
    BODY_ERRORS,
    JSON,
    NO_CONTENT,
    READINESS_ERRORS,
    declare_responses,
    json_response,
)
from service.routes.dependencies import AnyServer, ReadyServer

router = APIRouter(prefix="/v1/moves")

RECEIVE_RESPONSES = declare_responses(
    {201: JSON},
    *(*AUTH_ERRORS, *READINESS_ERRORS, *BODY_ERRORS, AdapterNotFound, ClusterUnavailable),
    *(Overloaded, QuotaExceeded, VersionConflict, VersionSuperseded, VersionUnavailable),
)
CANCEL_RESPONSES = declare_responses({204: NO_CONTENT}, *AUTH_ERRORS, RolloutNotFound)
SESSIONS_RESPONSES = declare_responses(
    {201: JSON},
    *(*AUTH_ERRORS, *READINESS_ERRORS, *BODY_ERRORS, AdapterNotFound, ClusterUnavailable),
    *(IdempotencyInProgress, IdempotencyMismatch, Overloaded, QuotaExceeded),
    *(VersionConflict, VersionSuperseded, VersionUnavailable),
)
CANCEL_SESSIONS_RESPONSES = declare_responses({204: NO_CONTENT}, *AUTH_ERRORS, SessionNotFound)


@router.post("", status_code=201, responses=RECEIVE_RESPONSES)
@requires_role("replica")
async def receive(request: Request, server: ReadyServer) -> Response:
    """Continue a rollout that another replica sends.

    A sender that disconnects before the rollout has started continues it itself.
    """
    state = await server.bodies.read_json(
        request, MovedRollout, limit=server.settings.limits.max_body_bytes
    )
    rollout = await cancel_on_disconnect(request, server.move_receiver.receive(state))
    return json_response(MoveAnswer(id=rollout.id), status_code=201)


@router.delete("/{rollout_id}", status_code=204, responses=CANCEL_RESPONSES)
@requires_role("replica")
async def cancel(rollout_id: str, server: AnyServer) -> Response:
    """Cancel a moved rollout whose sender did not receive the response to its request."""
    await server.move_receiver.cancel(rollout_id)
    return Response(status_code=204)


@router.post("/sessions", status_code=201, responses=SESSIONS_RESPONSES)
@requires_role("replica")
async def receive_sessions(request: Request, server: ReadyServer) -> Response:
    """Continue sessions that a draining replica sends; `id` is that of the first one.

    A sender that disconnects before they were accepted continues them itself.
    """
    state = await server.bodies.read_json(
        request, MovedSessions, limit=server.settings.limits.max_body_bytes
    )
    session_id = await cancel_on_disconnect(request, server.session_receiver.receive(state))
    return json_response(MoveAnswer(id=session_id), status_code=201)


@router.delete("/sessions/{session_id}", status_code=204, responses=CANCEL_SESSIONS_RESPONSES)
@requires_role("replica")
async def cancel_sessions(session_id: str, server: AnyServer) -> Response:
    """Return moved sessions to their sender, which did not receive the response to its request."""
    await server.session_receiver.cancel(session_id)
    return Response(status_code=204)

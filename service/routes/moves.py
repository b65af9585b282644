"""Routes under /v1/moves: another replica sends rollouts, sessions and handles to this one."""

from fastapi import APIRouter, Request, Response

from coppice.wire.moves import MoveAnswer, MovedHandle, MovedRollout
from coppice.wire.session_moves import MovedSessions
from service.auth.access import requires_role
from service.http.bodies import read_small_json
from service.http.errors import (
    AdapterNotFound,
    ClusterUnavailable,
    Draining,
    IdempotencyInProgress,
    IdempotencyMismatch,
    KvGone,
    KvNotFound,
    Overloaded,
    QuotaExceeded,
    RangeNotSatisfiable,
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
from service.moves.exports import owner_of
from service.prompt_kv.http_transfer import MEDIA_TYPE, KvDataResponse
from service.routes.dependencies import AnyServer, ReadyServer
from service.server import Server

router = APIRouter(prefix="/v1/moves")

RECEIVE_RESPONSES = declare_responses(
    {201: JSON},
    *(*AUTH_ERRORS, *READINESS_ERRORS, *BODY_ERRORS, AdapterNotFound, ClusterUnavailable),
    *(Overloaded, QuotaExceeded, VersionConflict, VersionSuperseded, VersionUnavailable),
)
KV_RESPONSES = declare_responses(
    {200: [MEDIA_TYPE], 206: [MEDIA_TYPE]},
    *(*AUTH_ERRORS, KvNotFound, KvGone, Draining, RangeNotSatisfiable, QuotaExceeded, Overloaded),
)
CANCEL_RESPONSES = declare_responses({204: NO_CONTENT}, *AUTH_ERRORS, RolloutNotFound)
SESSIONS_RESPONSES = declare_responses(
    {201: JSON},
    *(*AUTH_ERRORS, *READINESS_ERRORS, *BODY_ERRORS, AdapterNotFound, ClusterUnavailable),
    *(IdempotencyInProgress, IdempotencyMismatch, Overloaded, QuotaExceeded),
    *(VersionConflict, VersionSuperseded, VersionUnavailable),
)
HANDLE_RESPONSES = declare_responses(
    {201: JSON},
    *(*AUTH_ERRORS, *READINESS_ERRORS, *BODY_ERRORS, ClusterUnavailable, KvGone, Overloaded),
)
CANCEL_HANDLE_RESPONSES = declare_responses({204: NO_CONTENT}, *AUTH_ERRORS, KvNotFound)
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


@router.post("/kv", status_code=201, responses=HANDLE_RESPONSES)
@requires_role("replica")
async def receive_handle(request: Request, server: ReadyServer) -> Response:
    """Take over a prompt-KV handle that a draining replica sends.

    A sender that disconnects before it was accepted keeps it.
    """
    state = await read_small_json(request, MovedHandle)
    handle_id = await cancel_on_disconnect(request, server.handle_receiver.receive(state))
    return json_response(MoveAnswer(id=handle_id), status_code=201)


@router.delete("/kv/{handle}", status_code=204, responses=CANCEL_HANDLE_RESPONSES)
@requires_role("replica")
async def cancel_handle(handle: str, server: AnyServer) -> Response:
    """Remove a moved handle, whose sender did not receive the response and keeps it."""
    server.handle_receiver.cancel(handle)
    return Response(status_code=204)


@router.get("/kv/{handle}", responses=KV_RESPONSES)
@requires_role("replica")
async def handle_kv(handle: str, request: Request, server: AnyServer) -> Response:
    """KV of a handle that this replica is moving, for the replica that receives it."""
    owner = server.handle_sender.moving_owner(handle)
    return _kv_response(handle, owner, request, server, counted_as=owner_of(handle))


@router.get("/{rollout_id}/kv/{handle}", responses=KV_RESPONSES)
@requires_role("replica")
async def kv(rollout_id: str, handle: str, request: Request, server: AnyServer) -> Response:
    """KV of samples that this replica is moving, for the replica that continues them."""
    owner = owner_of(rollout_id)
    return _kv_response(handle, owner, request, server, counted_as=owner)


def _kv_response(
    handle: str, owner: str, request: Request, server: Server, *, counted_as: str
) -> Response:
    """File of a handle; its download is not one of the owner's API key."""
    return KvDataResponse(
        server.prompt_kv,
        server.socket_sender,
        handle,
        owner,
        range_header=request.headers.get("range"),
        if_range=request.headers.get("if-range"),
        counted_as=counted_as,
    )

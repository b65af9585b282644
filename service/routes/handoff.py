"""Routes under /v1/handoff: receive rollouts and sessions from a draining replica."""

from typing import TypeVar

from fastapi import APIRouter, Request, Response

from coppice.wire.handoff import HandoffAnswer, RolloutOffer, SessionsOffer
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
from service.handoff.receiver import Arrivals
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
from service.server import Server

router = APIRouter(prefix="/v1/handoff")
Offer = TypeVar("Offer", bound=RolloutOffer | SessionsOffer)

OFFER_ERRORS = (
    *(*AUTH_ERRORS, *READINESS_ERRORS, *BODY_ERRORS, AdapterNotFound, ClusterUnavailable),
    *(Overloaded, QuotaExceeded, VersionConflict, VersionSuperseded, VersionUnavailable),
)
ROLLOUT_RESPONSES = declare_responses({201: JSON}, *OFFER_ERRORS)
SESSIONS_RESPONSES = declare_responses(
    {201: JSON}, *OFFER_ERRORS, IdempotencyInProgress, IdempotencyMismatch
)
CANCEL_ROLLOUT_RESPONSES = declare_responses({204: NO_CONTENT}, *AUTH_ERRORS, RolloutNotFound)
CANCEL_SESSIONS_RESPONSES = declare_responses({204: NO_CONTENT}, *AUTH_ERRORS, SessionNotFound)


@router.post("/rollouts", status_code=201, responses=ROLLOUT_RESPONSES)
@requires_role("replica")
async def receive_rollout(request: Request, server: ReadyServer) -> Response:
    """Continue a rollout that a draining replica offers."""
    return await _receive(request, server, RolloutOffer, server.handoff.rollouts)


@router.delete("/rollouts/{rollout_id}", status_code=204, responses=CANCEL_ROLLOUT_RESPONSES)
@requires_role("replica")
async def cancel_rollout(rollout_id: str, server: AnyServer) -> Response:
    """Cancel the offer of a rollout whose sender did not receive the response."""
    await server.handoff.receiver.cancel(server.handoff.rollouts, rollout_id)
    return Response(status_code=204)


@router.post("/sessions", status_code=201, responses=SESSIONS_RESPONSES)
@requires_role("replica")
async def receive_sessions(request: Request, server: ReadyServer) -> Response:
    """Continue sessions that a draining replica offers; `id` is that of the first one."""
    return await _receive(request, server, SessionsOffer, server.handoff.sessions)


@router.delete("/sessions/{session_id}", status_code=204, responses=CANCEL_SESSIONS_RESPONSES)
@requires_role("replica")
async def cancel_sessions(session_id: str, server: AnyServer) -> Response:
    """Cancel the offer of sessions whose sender did not receive the response."""
    await server.handoff.receiver.cancel(server.handoff.sessions, session_id)
    return Response(status_code=204)


async def _receive(
    request: Request, server: Server, model: type[Offer], arrivals: Arrivals[Offer]
) -> Response:
    """Accept an offer. A sender that disconnects before that keeps what it offers."""
    limit = server.settings.limits.max_body_bytes
    offer = await server.bodies.read_json(request, model, limit=limit)
    receiving = server.handoff.receiver.receive(arrivals, offer)
    offer_id = await cancel_on_disconnect(request, receiving)
    return json_response(HandoffAnswer(id=offer_id), status_code=201)

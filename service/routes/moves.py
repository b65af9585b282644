"""Routes under /v1/moves: another replica sends its rollouts to this one."""

from fastapi import APIRouter, Request, Response

from coppice.wire.moves import MoveAnswer, MovedRollout
from service.auth.access import requires_role
from service.http.errors import (
    AdapterNotFound,
    ClusterUnavailable,
    Overloaded,
    QuotaExceeded,
    RolloutNotFound,
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


@router.post("", status_code=201, responses=RECEIVE_RESPONSES)
@requires_role("replica")
async def receive(request: Request, server: ReadyServer) -> Response:
    """Continue a rollout that another replica sends.

    A sender that disconnects before the rollout has started continues it itself.
    """
    state = await server.bodies.read_json(request, MovedRollout)
    rollout = await cancel_on_disconnect(request, server.move_receiver.receive(state))
    return json_response(MoveAnswer(id=rollout.id), status_code=201)


@router.delete("/{rollout_id}", status_code=204, responses=CANCEL_RESPONSES)
@requires_role("replica")
async def cancel(rollout_id: str, server: AnyServer) -> Response:
    """Cancel a moved rollout whose sender did not receive the response to its request."""
    await server.move_receiver.cancel(rollout_id)
    return Response(status_code=204)

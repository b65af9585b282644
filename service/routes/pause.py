"""Routes that pause and resume sampling."""

from fastapi import APIRouter, Request, Response

from coppice.wire.control import PauseAnswer, PauseRequest, ResumeRequest
from service.auth.access import Caller, requires_role
from service.http.bodies import read_small_json
from service.http.responses import ADMIN_ERRORS, BODY_ERRORS, JSON, declare_responses, json_response
from service.routes.dependencies import ReadyServer, ServingServer
from service.server import Server

router = APIRouter(prefix="/v1")


@router.post("/pause", responses=declare_responses({200: JSON}, *ADMIN_ERRORS, *BODY_ERRORS))
@requires_role("admin")
async def pause(request: Request, server: ReadyServer, caller: Caller) -> Response:
    """Pause sampling, or renew the pause of this API key."""
    body = await read_small_json(request, PauseRequest)
    await server.run_to_completion(
        server.activation.pause(caller.name, body.mode, body.lease_seconds)
    )
    return json_response(_answer(server))


@router.post("/resume", responses=declare_responses({200: JSON}, *ADMIN_ERRORS, *BODY_ERRORS))
@requires_role("admin")
async def resume(request: Request, server: ServingServer, caller: Caller) -> Response:
    """End the pause of this API key, or of all.

    Allowed while draining too, because paused samples could not finish otherwise.
    """
    body = await read_small_json(request, ResumeRequest)
    await server.run_to_completion(server.activation.resume(caller.name, is_for_all=body.all))
    return json_response(_answer(server))


def _answer(server: Server) -> PauseAnswer:
    activation = server.activation
    return PauseAnswer(paused=activation.paused, lease_seconds=activation.pause_seconds_left)

"""Routes that pause and resume sampling."""

from fastapi import APIRouter, Request, Response

from coppice.wire.control import PauseAnswer, PauseRequest
from service.auth.access import requires_role
from service.http.bodies import read_small_json
from service.http.responses import ADMIN_ERRORS, BODY_ERRORS, JSON, declare_responses, json_response
from service.routes.dependencies import ReadyServer, ServingServer

router = APIRouter(prefix="/v1")


@router.post("/pause", responses=declare_responses({200: JSON}, *ADMIN_ERRORS, *BODY_ERRORS))
@requires_role("admin")
async def pause(request: Request, server: ReadyServer) -> Response:
    body = await read_small_json(request, PauseRequest)
    await server.run_to_completion(server.activation.pause(body.mode))
    return json_response(PauseAnswer(paused=True))


@router.post("/resume", responses=declare_responses({200: JSON}, *ADMIN_ERRORS))
@requires_role("admin")
async def resume(server: ServingServer) -> Response:
    """Resume sampling.

    Allowed while draining too, because paused samples could not finish otherwise.
    """
    await server.run_to_completion(server.activation.resume())
    return json_response(PauseAnswer(paused=False))

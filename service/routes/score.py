"""Route of POST /v1/score."""

from fastapi import APIRouter, Request, Response

from coppice.wire.score import ScoreRequest
from service.auth.access import Caller, requires_role
from service.http.exception_handlers import cancel_on_disconnect
from service.http.responses import (
    AUTH_ERRORS,
    BODY_ERRORS,
    ENGINE_ERRORS,
    JSON,
    READINESS_ERRORS,
    declare_responses,
    model_parts,
    parts_response,
)
from service.routes.dependencies import ReadyServer

router = APIRouter(prefix="/v1/score")

SCORE_RESPONSES = declare_responses(
    {200: JSON}, *AUTH_ERRORS, *READINESS_ERRORS, *BODY_ERRORS, *ENGINE_ERRORS
)


@router.post("", responses=SCORE_RESPONSES)
@requires_role("rollout")
async def score(request: Request, server: ReadyServer, caller: Caller) -> Response:
    body = await server.bodies.read_json(request, ScoreRequest)
    answer = await cancel_on_disconnect(request, server.scoring.score(body, owner=caller.name))
    return await parts_response(lambda: model_parts(answer, "items"))

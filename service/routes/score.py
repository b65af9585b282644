"""Route POST /v1/score: logprobs of given responses, as JSON or in the packed format."""

from fastapi import APIRouter, Request, Response

from coppice.wire.packed.scores import pack_scores
from coppice.wire.score import ScoreRequest
from service.auth.access import Caller, requires_role
from service.http.exception_handlers import cancel_on_disconnect
from service.http.params import ResponseFormat, accepts_packed
from service.http.responses import (
    AUTH_ERRORS,
    BODY_ERRORS,
    ENGINE_ERRORS,
    READINESS_ERRORS,
    declare_responses,
    large_response,
    to_json_bytes,
)
from service.routes.dependencies import ReadyServer

router = APIRouter(prefix="/v1/score")

SCORE_RESPONSES = declare_responses(
    {200: (ResponseFormat.JSON, ResponseFormat.PACKED)},
    *AUTH_ERRORS,
    *READINESS_ERRORS,
    *BODY_ERRORS,
    *ENGINE_ERRORS,
)


@router.post("", responses=SCORE_RESPONSES)
@requires_role("rollout")
async def score(request: Request, server: ReadyServer, caller: Caller) -> Response:
    body = await server.bodies.read_packable(request, ScoreRequest)
    answer = await cancel_on_disconnect(request, server.scoring.score(body, owner=caller.name))
    if accepts_packed(request.headers.get("accept")):
        return await large_response(
            server.threads, lambda: pack_scores(answer), media_type=ResponseFormat.PACKED
        )
    return await large_response(server.threads, lambda: to_json_bytes(answer))

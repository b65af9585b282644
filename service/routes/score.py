"""POST /v1/score."""

from fastapi import APIRouter, Request, Response

from coppice.wire.score import ScoreRequest
from service.access import Caller, needs
from service.answers import JSON, OF_BODY, OF_ENGINE_WORK, WHEN_READY, WITH_KEY, answers
from service.connection import NOBODY_READS, while_connected
from service.routes.dependencies import ReadyServer

router = APIRouter(prefix="/v1/score")

SCORED = answers({200: JSON}, *WITH_KEY, *WHEN_READY, *OF_BODY, *OF_ENGINE_WORK)


@router.post("", responses=SCORED)
@needs("rollout")
async def score(request: Request, server: ReadyServer, caller: Caller) -> Response:
    body = await server.bodies.read_json(request, ScoreRequest)
    answer = await while_connected(request, server.scoring.score(body, owner=caller.name))
    if answer is None:
        return NOBODY_READS
    return Response(answer.model_dump_json(), media_type="application/json")

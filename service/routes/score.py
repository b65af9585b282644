"""POST /v1/score."""

import asyncio

from fastapi import APIRouter, Request, Response

from coppice.wire.score import ScoreRequest
from service.auth.access import Caller, needs
from service.http.disconnect import NOBODY_READS, while_connected
from service.http.json_response import PartsResponse, model_parts
from service.http.responses import JSON, OF_BODY, OF_ENGINE_WORK, WHEN_READY, WITH_KEY, answers
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
    parts = await asyncio.to_thread(lambda: list(model_parts(answer, "items")))
    return PartsResponse(parts, media_type="application/json")

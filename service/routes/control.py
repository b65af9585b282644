"""Pause and resume."""

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from coppice.wire.control import PauseAnswer, PauseRequest
from service.auth.access import needs
from service.http.bodies import read_small_json
from service.http.responses import JSON, OF_BODY, WHEN_READY, WITH_KEY, answers
from service.routes.dependencies import ReadyServer, ServingServer

router = APIRouter(prefix="/v1")


@router.post("/pause", responses=answers({200: JSON}, *WITH_KEY, *WHEN_READY, *OF_BODY))
@needs("admin")
async def pause(request: Request, server: ReadyServer) -> Response:
    body = await read_small_json(request, PauseRequest)
    await server.in_background(server.activation.pause(body.mode))
    return _json(PauseAnswer(paused=True))


@router.post("/resume", responses=answers({200: JSON}, *WITH_KEY, *WHEN_READY))
@needs("admin")
async def resume(server: ServingServer) -> Response:
    """Also while draining: what is frozen could never end otherwise."""
    await server.in_background(server.activation.resume())
    return _json(PauseAnswer(paused=False))


def _json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")

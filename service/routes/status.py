"""GET /v1/status."""

from fastapi import APIRouter, Response

from service.access import any_key
from service.answers import JSON, WITH_KEY, answers
from service.routes.dependencies import AnyServer
from service.state import status

router = APIRouter(prefix="/v1")


@router.get("/status", responses=answers({200: JSON}, *WITH_KEY))
@any_key
async def told(server: AnyServer) -> Response:
    return Response(status(server).model_dump_json(), media_type="application/json")

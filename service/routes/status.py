"""GET /v1/status."""

from fastapi import APIRouter, Response

from service.auth.access import any_key
from service.http.responses import JSON, WITH_KEY, answers
from service.observability.status import status
from service.routes.dependencies import AnyServer

router = APIRouter(prefix="/v1")


@router.get("/status", responses=answers({200: JSON}, *WITH_KEY))
@any_key
async def told(server: AnyServer) -> Response:
    return Response(status(server).model_dump_json(), media_type="application/json")

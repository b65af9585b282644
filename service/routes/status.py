"""Route of GET /v1/status."""

from fastapi import APIRouter, Response

from service.auth.access import allow_any_key
from service.http.responses import AUTH_ERRORS, JSON, declare_responses
from service.observability.status import status
from service.routes.dependencies import AnyServer

router = APIRouter(prefix="/v1")


@router.get("/status", responses=declare_responses({200: JSON}, *AUTH_ERRORS))
@allow_any_key
async def get_status(server: AnyServer) -> Response:
    return Response(status(server).model_dump_json(), media_type="application/json")

"""GET /metrics."""

from fastapi import APIRouter, Response

from service.auth.access import public
from service.http.responses import answers
from service.observability.status import observe
from service.routes.dependencies import AnyServer

router = APIRouter()


@router.get("/metrics", responses=answers({200: ["text/plain"]}))
@public
async def metrics(server: AnyServer) -> Response:
    observe(server)
    return Response(server.metrics.render(), media_type=server.metrics.content_type)

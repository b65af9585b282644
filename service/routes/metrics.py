"""GET /metrics."""

from fastapi import APIRouter, Response

from service.access import public
from service.answers import answers
from service.routes.dependencies import AnyServer
from service.state import observe

router = APIRouter()


@router.get("/metrics", responses=answers({200: ["text/plain"]}))
@public
async def metrics(server: AnyServer) -> Response:
    observe(server)
    return Response(server.metrics.render(), media_type=server.metrics.content_type)

"""Route of the Prometheus metrics, GET /metrics."""

from fastapi import APIRouter, Response

from service.auth.access import public
from service.http.responses import declare_responses
from service.observability.status import update_gauges
from service.routes.dependencies import AnyServer

router = APIRouter()


@router.get("/metrics", responses=declare_responses({200: ["text/plain"]}))
@public
async def metrics(server: AnyServer) -> Response:
    update_gauges(server)
    return Response(server.metrics.render(), media_type=server.metrics.content_type)

"""Routes for monitoring: health probes, status and Prometheus metrics.

/startupz  succeeds once the model is loaded
/readyz    succeeds while new requests can be served
/livez     fails if the engine is dead, so that a restart would help
/health    same as /readyz, for clients that expect it
"""

from fastapi import APIRouter, Response

from coppice.wire.status import HealthAnswer
from service.auth.access import allow_any_key, public
from service.errors import EngineGone, NotReady
from service.http.responses import (
    AUTH_ERRORS,
    JSON,
    READINESS_ERRORS,
    declare_responses,
    json_response,
)
from service.routes.dependencies import AnyServer, ReadyServer
from service.server import Server
from service.status.status import status, update_gauges

router = APIRouter()
metrics = APIRouter()

READY_RESPONSES = declare_responses({200: JSON}, *READINESS_ERRORS)


@router.get("/startupz", responses=declare_responses({200: JSON}, NotReady, EngineGone))
@public
async def started(server: AnyServer) -> Response:
    server.readiness.check_started()
    return _healthy(server)


@router.get("/readyz", responses=READY_RESPONSES)
@router.get("/health", responses=READY_RESPONSES)
@public
async def ready(server: ReadyServer) -> Response:
    return _healthy(server)


@router.get("/livez", responses=declare_responses({200: JSON}, EngineGone))
@public
async def alive(server: AnyServer) -> Response:
    server.readiness.check_alive()
    return _healthy(server)


@router.get("/v1/status", responses=declare_responses({200: JSON}, *AUTH_ERRORS))
@allow_any_key
async def get_status(server: AnyServer) -> Response:
    return json_response(status(server))


@metrics.get("/metrics", responses=declare_responses({200: ["text/plain"]}))
@public
async def render_metrics(server: AnyServer) -> Response:
    update_gauges(server)
    return Response(server.metrics.render(), media_type=server.metrics.content_type)


def _healthy(server: Server) -> Response:
    return json_response(HealthAnswer(stage=server.engine.health().stage))

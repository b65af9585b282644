"""The probes, each with its own question, and the metrics.

/startupz  has the model been loaded?
/readyz    can requests be sent here now?
/livez     would a restart help if this is false?
/health    as /readyz, for clients that expect it
"""

from fastapi import APIRouter, Response

from coppice.wire.control import HealthAnswer
from service.access import public
from service.routes.dependencies import AnyServer, ReadyServer
from service.server import Server

router = APIRouter()


@router.get("/startupz")
@router.get("/readyz")
@router.get("/health")
@public
async def ready(server: ReadyServer) -> Response:
    return _healthy(server)


@router.get("/livez")
@public
async def alive(server: AnyServer) -> Response:
    server.check_alive()
    return _healthy(server)


@router.get("/metrics")
@public
async def metrics(server: AnyServer) -> Response:
    server.observe()
    return Response(server.metrics.render(), media_type=server.metrics.content_type)


def _healthy(server: Server) -> Response:
    answer = HealthAnswer(stage=server.engine.pulse().stage)
    return Response(answer.model_dump_json(), media_type="application/json")

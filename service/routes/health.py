"""Routes of the health probes.

/startupz  succeeds once the model is loaded
/readyz    succeeds while new requests can be served
/livez     fails if the engine is dead, so that a restart would help
/health    same as /readyz, for clients that expect it
"""

from fastapi import APIRouter, Response

from coppice.wire.control import HealthAnswer
from service.auth.access import public
from service.http.errors import EngineGone, NotReady
from service.http.responses import JSON, READINESS_ERRORS, declare_responses
from service.routes.dependencies import AnyServer, ReadyServer
from service.server import Server

router = APIRouter()

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


def _healthy(server: Server) -> Response:
    answer = HealthAnswer(stage=server.engine.health().stage)
    return Response(answer.model_dump_json(), media_type="application/json")

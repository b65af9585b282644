"""/v1/kv: what a handle is of, its bytes, who else has them, its lease, its end."""

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from coppice.wire.kv import KvLease, KvLeaseAnswer
from service.auth.access import Caller, needs
from service.http.bodies import read_small_json
from service.http.errors import (
    DirectoryUnavailable,
    Draining,
    InvalidRequest,
    KvGone,
    KvNotFound,
    KvVersionConflict,
    Overloaded,
    QuotaExceeded,
    RangeNotSatisfiable,
)
from service.http.params import asserted_version
from service.http.responses import ELSEWHERE, JSON, NOTHING, OF_BODY, WITH_KEY, answers
from service.prompt_kv.http_transfer import MEDIA_TYPE, KvData
from service.routes.dependencies import HANDLE_HERE, AnyServer

router = APIRouter(prefix="/v1/kv/{handle}", dependencies=[HANDLE_HERE])

HELD = (*WITH_KEY, KvNotFound, KvGone, Draining, DirectoryUnavailable)
OK = {200: JSON, **ELSEWHERE}
DATA = answers(
    {200: [MEDIA_TYPE], 206: [MEDIA_TYPE], **ELSEWHERE},
    *HELD,
    RangeNotSatisfiable,
    QuotaExceeded,
    Overloaded,
)


@router.get("", responses=answers(OK, *HELD, KvVersionConflict, InvalidRequest))
@needs("kv")
async def look(handle: str, request: Request, server: AnyServer, caller: Caller) -> Response:
    version = asserted_version(request.query_params)
    found = server.prompt_kv.get(handle, caller.name)
    layout = server.prompt_kv.layout(found)
    if version not in (None, layout.version):
        raise KvVersionConflict(f"they are of {layout.version}")
    return _json(layout)


@router.head("/data", responses=DATA)
@router.get("/data", responses=DATA)
@needs("kv")
async def data(handle: str, request: Request, server: AnyServer, caller: Caller) -> Response:
    return KvData(
        server.prompt_kv,
        server.sending,
        lambda: server.prompt_kv.get(handle, caller.name),
        range_header=request.headers.get("range"),
        if_range=request.headers.get("if-range"),
    )


@router.get("/agent", responses=answers(OK, *HELD))
@needs("kv")
async def agent(handle: str, server: AnyServer, caller: Caller) -> Response:
    server.prompt_kv.get(handle, caller.name)
    known = server.prompt_kv.agent
    if known is None:
        raise KvNotFound("there are no one-sided reads here")
    return _json(known)


@router.post("/lease", responses=answers(OK, *HELD, *OF_BODY))
@needs("kv")
async def renew(handle: str, request: Request, server: AnyServer, caller: Caller) -> Response:
    body = await read_small_json(request, KvLease)
    found = server.prompt_kv.get(handle, caller.name)
    seconds = server.prompt_kv.handles.renew(found, body.seconds)
    return _json(KvLeaseAnswer(lease_seconds=seconds))


@router.delete("", responses=answers({204: NOTHING, **ELSEWHERE}, *HELD))
@needs("kv")
async def release(handle: str, server: AnyServer, caller: Caller) -> Response:
    server.prompt_kv.release(handle, caller.name)
    return Response(status_code=204)


def _json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")

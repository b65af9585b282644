"""Routes under /v1/kv: layout, data, NIXL agent, GPU memory, lease and release of a handle."""

from fastapi import APIRouter, Request, Response

from coppice.wire.prompt_kv import KvLease, KvLeaseAnswer
from service.auth.access import Caller, requires_role
from service.errors import (
    ClusterUnavailable,
    Draining,
    InvalidRequest,
    KvGone,
    KvNotFound,
    KvVersionConflict,
    Overloaded,
    QuotaExceeded,
    RangeNotSatisfiable,
)
from service.http.bodies import read_small_json
from service.http.params import boot_id_of, expected_version
from service.http.responses import (
    AUTH_ERRORS,
    BODY_ERRORS,
    JSON,
    NO_CONTENT,
    REDIRECT,
    declare_responses,
    json_response,
)
from service.kv.handles.downloads import MEDIA_TYPE, KvDataResponse
from service.routes.dependencies import HANDLE_LOCAL, AnyServer

router = APIRouter(prefix="/v1/kv/{handle}", dependencies=[HANDLE_LOCAL])

HANDLE_ERRORS = (*AUTH_ERRORS, KvNotFound, KvGone, Draining, ClusterUnavailable)
HANDLE_SUCCESSES = {200: JSON, **REDIRECT}
DATA_RESPONSES = declare_responses(
    {200: [MEDIA_TYPE], 206: [MEDIA_TYPE], **REDIRECT},
    *HANDLE_ERRORS,
    RangeNotSatisfiable,
    QuotaExceeded,
    Overloaded,
)


@router.get(
    "",
    responses=declare_responses(
        HANDLE_SUCCESSES, *HANDLE_ERRORS, KvVersionConflict, InvalidRequest
    ),
)
@requires_role("kv")
async def get_handle(handle: str, request: Request, server: AnyServer, caller: Caller) -> Response:
    version = expected_version(request.query_params)
    found = server.prompt_kv.get(handle, caller.name)
    layout = server.prompt_kv.layout(found)
    if version not in (None, layout.version):
        raise KvVersionConflict(f"the prompt KV is of weights version {layout.version}")
    return json_response(layout)


@router.head("/data", responses=DATA_RESPONSES)
@router.get("/data", responses=DATA_RESPONSES)
@requires_role("kv")
async def data(handle: str, request: Request, server: AnyServer, caller: Caller) -> Response:
    return KvDataResponse(
        server.prompt_kv,
        server.kv_downloads,
        handle,
        caller.name,
        range_header=request.headers.get("range"),
        if_range=request.headers.get("if-range"),
    )


@router.get("/agent", responses=declare_responses(HANDLE_SUCCESSES, *HANDLE_ERRORS))
@requires_role("kv")
async def agent(handle: str, server: AnyServer, caller: Caller) -> Response:
    server.prompt_kv.get(handle, caller.name)
    agent_info = server.prompt_kv.agent
    if agent_info is None:
        raise KvNotFound(
            "the server does not offer one-sided reads (NIXL): read the data over HTTP"
        )
    return json_response(agent_info)


@router.get("/gpu", responses=declare_responses(HANDLE_SUCCESSES, *HANDLE_ERRORS, InvalidRequest))
@requires_role("kv")
async def gpu(handle: str, request: Request, server: AnyServer, caller: Caller) -> Response:
    boot_id = boot_id_of(request.query_params)
    memory = server.prompt_kv.gpu(server.prompt_kv.get(handle, caller.name), boot_id)
    if memory is None:
        raise KvNotFound("this KV is not in GPU memory that you can read: read the data over HTTP")
    return json_response(memory)


@router.post("/lease", responses=declare_responses(HANDLE_SUCCESSES, *HANDLE_ERRORS, *BODY_ERRORS))
@requires_role("kv")
async def renew(handle: str, request: Request, server: AnyServer, caller: Caller) -> Response:
    body = await read_small_json(request, KvLease)
    found = server.prompt_kv.get(handle, caller.name)
    return json_response(KvLeaseAnswer(lease_seconds=found.renew(body.lease_seconds)))


@router.delete("", responses=declare_responses({204: NO_CONTENT, **REDIRECT}, *HANDLE_ERRORS))
@requires_role("kv")
async def release(handle: str, server: AnyServer, caller: Caller) -> Response:
    server.prompt_kv.release(handle, caller.name)
    return Response(status_code=204)

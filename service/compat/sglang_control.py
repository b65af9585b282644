"""SGLang's routes for a trainer: pause, abort, weights from a directory, and how it is."""

from typing import Annotated, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field
from pydantic_core import to_json

from coppice.wire.base import Label
from engine.protocol import PauseMode
from service.auth.access import Caller, any_key, needs, public
from service.compat.bodies import ForeignModel, read_foreign
from service.compat.openapi_document import body_of
from service.compat.request_ids import Running
from service.compat.vllm_control import ADMIN, CHANGED, EmptyBody, Updates
from service.http.cross_site import refuse_browsers
from service.http.errors import InvalidRequest
from service.http.responses import JSON, OF_BODY, WHEN_READY, WITH_KEY, answers
from service.routes.dependencies import AnyServer, ReadyServer, ServingServer

router = APIRouter()

# What SGLang calls them: in place, samples keep what they hold; retracted, they compute it anew.
_MODES: dict[str, PauseMode] = {"abort": "abort", "retract": "keep", "in_place": "keep"}


class PauseBody(ForeignModel):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class AbortBody(ForeignModel):
    rid: Annotated[str, Field(max_length=256)] = ""
    abort_all: bool = False


class DiskBody(ForeignModel):
    model_path: Annotated[str, Field(min_length=1, max_length=4096)]
    weight_version: Label | None = None


@router.post(
    "/pause_generation",
    responses=answers({200: JSON}, *ADMIN, *OF_BODY),
    openapi_extra=body_of(PauseBody),
)
@needs("admin")
async def pause(request: Request, server: ReadyServer) -> Response:
    body = await read_foreign(request, PauseBody, server)
    await server.in_background(server.activation.pause(_MODES[body.mode]))
    return _json({"message": "paused", "status": "ok"})


@router.post(
    "/continue_generation",
    responses=answers({200: JSON}, *ADMIN, *OF_BODY),
    openapi_extra=body_of(EmptyBody),
)
@needs("admin")
async def resume(request: Request, server: ServingServer) -> Response:
    await read_foreign(request, EmptyBody, server)
    await server.in_background(server.activation.resume())
    return _json({"message": "continued", "status": "ok"})


@router.post(
    "/abort_request",
    responses=answers({200: JSON}, *ADMIN, *OF_BODY),
    openapi_extra=body_of(AbortBody),
)
@needs("rollout")
async def abort(
    request: Request, server: ServingServer, caller: Caller, running: Running
) -> Response:
    """Ends what this key has running; tokens so far go to whoever waits for them."""
    body = await read_foreign(request, AbortBody, server)
    if not (body.abort_all or body.rid):
        raise InvalidRequest.of_parameter("rid", "give rid, or abort_all")
    if body.abort_all:
        await server.rollouts.cancel_of(caller.name)
    else:
        for rollout in running.find(caller.name, body.rid):
            await server.rollouts.cancel(rollout)
    return _json({"status": "ok"})


@router.post("/update_weights_from_disk", responses=CHANGED, openapi_extra=body_of(DiskBody))
@needs("admin")
async def update(request: Request, server: ReadyServer, updates: Updates) -> Response:
    body = await read_foreign(request, DiskBody, server)
    version = await server.in_background(updates.publish(body.model_path, body.weight_version))
    return _json({"success": True, "message": "loaded", "weight_version": version.label})


@router.get("/flush_cache", responses=answers({200: JSON}, *ADMIN))
@needs("admin")
async def flush_cache_by_get(request: Request, server: ReadyServer) -> Response:
    """SGLang's own clients, miles and slime among them, send GET."""
    refuse_browsers(request.headers)
    return await flush_cache(server)


@router.post("/flush_cache", responses=answers({200: JSON}, *ADMIN))
@needs("admin")
async def flush_cache(server: ReadyServer) -> Response:
    await server.in_background(server.activation.forget_prefixes())
    return _json({"success": True, "message": "flushed"})


@router.get("/get_weight_version", responses=answers({200: JSON}, *WITH_KEY, *WHEN_READY))
@any_key
async def weight_version(server: ReadyServer) -> Response:
    return _json({"weight_version": server.versions.active.label})


@router.get("/model_info", responses=answers({200: JSON}, *WITH_KEY, *WHEN_READY))
@router.get("/get_model_info", responses=answers({200: JSON}, *WITH_KEY, *WHEN_READY))
@any_key
async def model_info(server: ReadyServer) -> Response:
    facts = server.engine.facts
    info = {
        "model_path": facts.model,
        "tokenizer_path": facts.model,
        "is_generation": True,
        "weight_version": server.versions.active.label,
    }
    return _json(info)


@router.get("/v1/loads", responses=answers({200: JSON}, *WITH_KEY))
@any_key
async def loads(server: AnyServer) -> Response:
    """Slime asks until there is nothing left."""
    running = server.rollouts.num_samples_running
    load = {"dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": 0, "num_reqs": running}
    return _json({"loads": [load]})


@router.get("/health_generate", responses=answers({200: JSON}, *WHEN_READY))
@public
async def health_generate(server: ReadyServer) -> Response:
    return _json({"status": "ok"})


def _json(value: object) -> Response:
    return Response(to_json(value), media_type="application/json")

"""SGLang's control routes: pause, release of memory, abort, weight updates and status."""

from typing import Annotated, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from coppice.wire.base import Label
from coppice.wire.pause import DEFAULT_PAUSE_LEASE_SECONDS, DEFAULT_SLEEP_LEASE_SECONDS, PauseLease
from engine.types.samples import KV_CACHE, WEIGHTS, PauseMode, SleepTag
from service.auth.access import Caller, allow_any_key, public, requires_role
from service.compat.bodies import CompatModel, Directory, EmptyBody, request_body
from service.compat.sglang.running_requests import RunningRequests
from service.compat.weight_updates import Updates
from service.errors import InvalidRequest
from service.http.cross_site import refuse_browsers
from service.http.responses import (
    json_response,
)
from service.routes.dependencies import AnyServer, ReadyServer, ServingServer
from service.routes.pause import check_can_sleep

router = APIRouter()

MemoryTags = Annotated[
    list[Literal["weights", "kv_cache", "cuda_graph"]], Field(min_length=1, max_length=3)
]
# SGLang's pause modes. With in_place, running samples keep their KV; with retract, SGLang
# recomputes it.
_MODES: dict[str, PauseMode] = {"abort": "abort", "retract": "keep", "in_place": "keep"}


class PauseBody(CompatModel):
    """Request body of SGLang's /pause_generation, with the addition of `lease_seconds`."""

    mode: Literal["abort", "retract", "in_place"] = "abort"
    lease_seconds: PauseLease = DEFAULT_PAUSE_LEASE_SECONDS


class ReleaseBody(CompatModel):
    """Request body of SGLang's /release_memory_occupation, with the addition of `lease_seconds`."""

    tags: MemoryTags | None = None
    lease_seconds: PauseLease = DEFAULT_SLEEP_LEASE_SECONDS


class MemoryBody(CompatModel):
    """Request body of SGLang's /resume_memory_occupation."""

    tags: MemoryTags | None = None


class AbortBody(CompatModel):
    rid: Annotated[str, Field(max_length=256)] = ""
    abort_all: bool = False


class DiskBody(CompatModel):
    model_path: Directory
    weight_version: Label | None = None


@router.post("/pause_generation", openapi_extra=request_body(PauseBody))
@requires_role("admin")
async def pause(request: Request, server: ReadyServer, caller: Caller) -> Response:
    body = await server.bodies.read_json(request, PauseBody)
    await server.run_to_completion(
        server.activation.pauses.pause(caller.name, _MODES[body.mode], body.lease_seconds)
    )
    return json_response({"message": "paused", "status": "ok"})


@router.post("/continue_generation", openapi_extra=request_body(EmptyBody))
@requires_role("admin")
async def resume(request: Request, server: ServingServer, caller: Caller) -> Response:
    await server.bodies.read_json(request, EmptyBody)
    await server.run_to_completion(server.activation.pauses.resume(caller.name))
    return json_response({"message": "continued", "status": "ok"})


@router.post("/release_memory_occupation", openapi_extra=request_body(ReleaseBody))
@requires_role("admin")
async def release_memory(request: Request, server: ReadyServer, caller: Caller) -> Response:
    """Release the KV cache, and the weights if they are named or nothing is.

    Released weights are dropped, as in SGLang. In SGLang a trainer must send them again; here they
    are loaded from the active version unless it does.
    """
    body = await server.bodies.read_json(request, ReleaseBody)
    check_can_sleep(server)
    tags = _sleep_tags(body.tags)
    if KV_CACHE not in tags:
        raise InvalidRequest.of_parameter("tags", "must include kv_cache")
    work = server.activation.sleep.sleep(
        caller.name, 2 if WEIGHTS in tags else 1, tags, "keep", body.lease_seconds
    )
    await server.run_to_completion(work)
    return json_response({"status": "ok"})


@router.post("/resume_memory_occupation", openapi_extra=request_body(MemoryBody))
@requires_role("admin")
async def resume_memory(request: Request, server: ServingServer, caller: Caller) -> Response:
    body = await server.bodies.read_json(request, MemoryBody)
    work = server.activation.sleep.wake(caller.name, _sleep_tags(body.tags))
    await server.run_to_completion(work)
    return json_response({"status": "ok"})


def _sleep_tags(
    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None,
) -> frozenset[SleepTag]:
    """Tags of the engine's memory; CUDA graphs sleep with the KV cache."""
    named = {"weights", "kv_cache"} if tags is None else set(tags)
    return frozenset(tag for tag in (WEIGHTS, KV_CACHE) if tag in named)


@router.post("/abort_request", openapi_extra=request_body(AbortBody))
@requires_role("rollout")
async def abort(
    request: Request, server: ServingServer, caller: Caller, running: RunningRequests
) -> Response:
    """Abort running rollouts of this API key; their callers receive the tokens generated so far."""
    body = await server.bodies.read_json(request, AbortBody)
    if not (body.abort_all or body.rid):
        raise InvalidRequest.of_parameter("rid", "send rid, or abort_all: true")
    if body.abort_all:
        await server.rollouts.cancel_owned_by(caller.name)
    else:
        for rollout in running.find(caller.name, body.rid):
            await server.rollouts.cancel(rollout)
    return json_response({"status": "ok"})


@router.post("/update_weights_from_disk", openapi_extra=request_body(DiskBody))
@requires_role("admin")
async def update(request: Request, server: ReadyServer, updates: Updates) -> Response:
    body = await server.bodies.read_json(request, DiskBody)
    version = await server.run_to_completion(updates.publish(body.model_path, body.weight_version))
    return json_response({"success": True, "message": "loaded", "weight_version": version.label})


@router.get("/flush_cache")
@requires_role("admin")
async def flush_cache_by_get(request: Request, server: ReadyServer) -> Response:
    """Flush the prefix cache by GET, the method that miles, slime and SGLang's clients use."""
    refuse_browsers(request.headers)
    return await flush_cache(server)


@router.post("/flush_cache")
@requires_role("admin")
async def flush_cache(server: ReadyServer) -> Response:
    await server.run_to_completion(server.activation.reset_prefix_cache())
    return json_response({"success": True, "message": "flushed"})


@router.get("/get_weight_version")
@allow_any_key
async def weight_version(server: ReadyServer) -> Response:
    return json_response({"weight_version": server.versions.active.label})


@router.get("/model_info")
@router.get("/get_model_info")
@allow_any_key
async def model_info(server: ReadyServer) -> Response:
    info = server.engine.info
    server_info = {
        "model_path": info.model,
        "tokenizer_path": info.model,
        "is_generation": True,
        "weight_version": server.versions.active.label,
    }
    return json_response(server_info)


@router.get("/v1/loads")
@allow_any_key
async def loads(server: AnyServer) -> Response:
    """Number of running samples in SGLang's format; the trainer slime polls it until it is 0."""
    running = server.rollouts.num_samples_running
    load = {"dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": 0, "num_reqs": running}
    return json_response({"loads": [load]})


@router.get("/health_generate")
@public
async def health_generate(server: ReadyServer) -> Response:
    return json_response({"status": "ok"})

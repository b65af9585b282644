"""vLLM's control routes: pause and resume, sleep, weight updates and server information."""

from fastapi import APIRouter, Request, Response

from coppice.wire.base import Label
from coppice.wire.pause import DEFAULT_SLEEP_LEASE_SECONDS
from engine.types.samples import KV_CACHE, WEIGHTS, PauseMode, SleepLevel, SleepTag
from service.auth.access import Caller, allow_any_key, public, requires_role
from service.compat.bodies import CompatModel, Directory, EmptyBody, request_body
from service.compat.unsupported_routes import NCCL
from service.compat.weight_updates import Updates
from service.errors import (
    InvalidRequest,
    Unsupported,
)
from service.http.params import pause_lease
from service.http.responses import json_response
from service.routes.dependencies import AnyServer, ReadyServer, ServingServer
from service.routes.pause import check_can_sleep
from service.server import Server

router = APIRouter()

LEVELS: dict[str, SleepLevel] = {"1": 1, "2": 2}
ALL_TAGS: frozenset[SleepTag] = frozenset((WEIGHTS, KV_CACHE))
KV_CACHE_ONLY: frozenset[SleepTag] = frozenset((KV_CACHE,))
SCHEDULING = "scheduling"
"""vLLM's tag of level 0, which is only a pause."""
MODES: tuple[PauseMode, ...] = ("abort", "wait", "keep")


class UpdateBody(CompatModel):
    """Request body of vLLM's POST /update_weights.

    prime-rl sends a directory. TRL announces the tensors that it is about to broadcast.
    """

    weight_dir: Directory | None = None
    update_info: dict[str, object] | None = None
    weight_version: Label | None = None


class FinishBody(CompatModel):
    weight_version: Label | None = None


def _mode(request: Request) -> PauseMode:
    mode = request.query_params.get("mode", "abort")
    if mode not in MODES:
        raise InvalidRequest.of_parameter("mode", f"must be one of {', '.join(MODES)}")
    return mode


@router.post("/pause")
@requires_role("admin")
async def pause(request: Request, server: ReadyServer, caller: Caller) -> Response:
    """Pause generation, in one of vLLM's modes: abort, wait or keep.

    The parameter `clear_cache` has no effect: a prefix is never reused across weights versions.
    `lease_seconds` is an addition to vLLM's protocol.
    """
    mode = _mode(request)
    lease_seconds = pause_lease(request.query_params)
    await server.run_to_completion(server.activation.pauses.pause(caller.name, mode, lease_seconds))
    return json_response({"status": "paused"})


@router.post("/resume")
@requires_role("admin")
async def resume(server: ServingServer, caller: Caller) -> Response:
    await server.run_to_completion(server.activation.pauses.resume(caller.name))
    return json_response({"status": "resumed"})


@router.get("/is_paused")
@allow_any_key
async def is_paused(server: ReadyServer) -> Response:
    return json_response({"is_paused": server.activation.pauses.paused})


@router.post("/sleep")
@requires_role("admin")
async def sleep(request: Request, server: ReadyServer, caller: Caller) -> Response:
    """Release the engine's memory at vLLM's level 1 or 2; level 0 is a pause.

    `lease_seconds` is an addition to vLLM's protocol.
    """
    mode = _mode(request)
    level = request.query_params.get("level", "1")
    if level == "0":
        lease_seconds = pause_lease(request.query_params)
        work = server.activation.pauses.pause(caller.name, mode, lease_seconds)
    elif level in LEVELS:
        check_can_sleep(server)
        lease_seconds = pause_lease(request.query_params, DEFAULT_SLEEP_LEASE_SECONDS)
        work = server.activation.sleep.sleep(
            caller.name, LEVELS[level], ALL_TAGS, mode, lease_seconds
        )
    else:
        raise InvalidRequest.of_parameter("level", "must be 0, 1 or 2")
    await server.run_to_completion(work)
    return json_response({"status": "sleeping", "level": int(level)})


@router.post("/release_kv_cache_memory")
@requires_role("admin")
async def release_kv_cache_memory(
    request: Request, server: ReadyServer, caller: Caller
) -> Response:
    """Release the memory of the KV cache only; unlike in vLLM, no earlier pause is needed.

    `lease_seconds` is an addition to vLLM's protocol.
    """
    check_can_sleep(server)
    lease_seconds = pause_lease(request.query_params, DEFAULT_SLEEP_LEASE_SECONDS)
    work = server.activation.sleep.sleep(caller.name, 1, KV_CACHE_ONLY, "keep", lease_seconds)
    await server.run_to_completion(work)
    return json_response({"status": "kv_cache_released"})


@router.post("/wake_up")
@requires_role("admin")
async def wake_up(request: Request, server: ServingServer, caller: Caller) -> Response:
    """Allocate the memory with the given tags again, or all of it; end a pause of level 0."""
    tags = request.query_params.getlist("tags")
    if not set(tags) <= {*ALL_TAGS, SCHEDULING}:
        raise InvalidRequest.of_parameter("tags", "must be weights, kv_cache or scheduling")
    woken = ALL_TAGS & set(tags) if tags else ALL_TAGS
    await server.run_to_completion(_wake_up(server, caller.name, woken))
    is_awake = not server.activation.sleep.tags
    return json_response({"status": "awake" if is_awake else "sleeping", "tags": tags or None})


async def _wake_up(server: Server, owner: str, tags: frozenset[SleepTag]) -> None:
    await server.activation.sleep.wake(owner, tags)
    if not server.activation.sleep.tags:
        await server.activation.pauses.resume(owner)


@router.get("/is_sleeping")
@allow_any_key
async def is_sleeping(server: ReadyServer) -> Response:
    """State of the engine: as in vLLM, a pause counts as sleep."""
    return json_response({"is_sleeping": server.activation.pauses.paused})


@router.post("/start_weight_update", openapi_extra=request_body(EmptyBody))
@requires_role("admin")
async def start(request: Request, server: ReadyServer, updates: Updates) -> Response:
    await server.bodies.read_json(request, EmptyBody)
    await server.run_to_completion(updates.start())
    return json_response({"message": "started"})


@router.post("/update_weights", openapi_extra=request_body(UpdateBody))
@requires_role("admin")
async def update(request: Request, server: ReadyServer, updates: Updates) -> Response:
    body = await server.bodies.read_json(request, UpdateBody)
    if body.weight_dir is None:
        raise Unsupported(NCCL)
    version = await server.run_to_completion(updates.update(body.weight_dir, body.weight_version))
    return json_response({"status": "ok", "weight_version": version.label, "state": version.state})


@router.post("/finish_weight_update", openapi_extra=request_body(FinishBody))
@requires_role("admin")
async def finish(request: Request, server: ReadyServer, updates: Updates) -> Response:
    body = await server.bodies.read_json(request, FinishBody)
    version = await server.run_to_completion(updates.finish(body.weight_version))
    return json_response({"message": "finished", "weight_version": version.label})


@router.post("/reset_prefix_cache")
@requires_role("admin")
async def reset_prefix_cache(server: ReadyServer) -> Response:
    await server.run_to_completion(server.activation.reset_prefix_cache())
    return json_response({"success": True})


@router.get("/get_world_size")
@allow_any_key
async def world_size(server: ReadyServer) -> Response:
    info = server.engine.info
    ranks = info.tensor_parallel_size * info.pipeline_parallel_size
    return json_response({"world_size": ranks * info.data_parallel_size})


@router.get("/liveness")
@public
async def liveness(server: AnyServer) -> Response:
    server.readiness.check_alive()
    return json_response({"status": "ok"})

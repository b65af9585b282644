"""vLLM's control routes for trainers: pause and resume, weight updates and server information."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from pydantic import Field
from pydantic_core import to_json

from coppice.wire.base import Label
from engine.types import EngineInfo, PauseMode
from service.auth.access import allow_any_key, public, requires_role
from service.compat.bodies import CompatModel, read_compat_body
from service.compat.openapi_document import request_body
from service.compat.unsupported_routes import NCCL
from service.compat.weight_update_protocol import WeightUpdates
from service.http.errors import (
    ActivationFailed,
    EngineGone,
    InvalidRequest,
    PathRefused,
    RollbackRefused,
    Unsupported,
    VersionConflict,
    VersionNotFound,
    WeightsRefused,
)
from service.http.responses import (
    AUTH_ERRORS,
    BODY_ERRORS,
    JSON,
    READINESS_ERRORS,
    declare_responses,
)
from service.routes.dependencies import AnyServer, ReadyServer, ServingServer

router = APIRouter()

MODES: tuple[PauseMode, ...] = ("abort", "wait", "keep")
ADMIN_ERRORS = (*AUTH_ERRORS, *READINESS_ERRORS)
UPDATE_RESPONSES = declare_responses(
    {200: JSON},
    *(*ADMIN_ERRORS, *BODY_ERRORS, PathRefused, WeightsRefused, ActivationFailed, Unsupported),
    *(VersionConflict, VersionNotFound, RollbackRefused),
)


class EmptyBody(CompatModel):
    """Body whose fields are all ignored."""


class UpdateBody(CompatModel):
    """Body of a weight update.

    prime-rl sends a directory. TRL announces the tensors that it is about to broadcast.
    """

    weight_dir: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    update_info: dict[str, Any] | None = None
    weight_version: Label | None = None


class FinishBody(CompatModel):
    weight_version: Label | None = None


def _updates(request: Request) -> WeightUpdates:
    updates: WeightUpdates = request.app.state.weight_updates
    return updates


Updates = Annotated[WeightUpdates, Depends(_updates)]


@router.post("/pause", responses=declare_responses({200: JSON}, *ADMIN_ERRORS, InvalidRequest))
@requires_role("admin")
async def pause(request: Request, server: ReadyServer) -> Response:
    """Pause generation.

    The parameter `clear_cache` has no effect: a prefix is never reused across weights versions.
    """
    mode = request.query_params.get("mode", "abort")
    if mode not in MODES:
        raise InvalidRequest.of_parameter("mode", f"one of {', '.join(MODES)}")
    await server.run_to_completion(server.activation.pause(mode))
    return _json({"status": "paused"})


@router.post("/resume", responses=declare_responses({200: JSON}, *ADMIN_ERRORS))
@requires_role("admin")
async def resume(server: ServingServer) -> Response:
    await server.run_to_completion(server.activation.resume())
    return _json({"status": "resumed"})


@router.get("/is_paused", responses=declare_responses({200: JSON}, *ADMIN_ERRORS))
@allow_any_key
async def is_paused(server: ReadyServer) -> Response:
    return _json({"is_paused": server.activation.paused})


@router.post(
    "/start_weight_update", responses=UPDATE_RESPONSES, openapi_extra=request_body(EmptyBody)
)
@requires_role("admin")
async def start(request: Request, server: ReadyServer, updates: Updates) -> Response:
    await read_compat_body(request, EmptyBody, server)
    await server.run_to_completion(updates.start())
    return _json({"message": "started"})


@router.post("/update_weights", responses=UPDATE_RESPONSES, openapi_extra=request_body(UpdateBody))
@requires_role("admin")
async def update(request: Request, server: ReadyServer, updates: Updates) -> Response:
    body = await read_compat_body(request, UpdateBody, server)
    if body.weight_dir is None:
        raise Unsupported(NCCL)
    version = await server.run_to_completion(updates.update(body.weight_dir, body.weight_version))
    return _json({"status": "ok", "weight_version": version.label, "state": version.state})


@router.post(
    "/finish_weight_update", responses=UPDATE_RESPONSES, openapi_extra=request_body(FinishBody)
)
@requires_role("admin")
async def finish(request: Request, server: ReadyServer, updates: Updates) -> Response:
    body = await read_compat_body(request, FinishBody, server)
    version = await server.run_to_completion(updates.finish(body.weight_version))
    return _json({"message": "finished", "weight_version": version.label})


@router.post("/reset_prefix_cache", responses=declare_responses({200: JSON}, *ADMIN_ERRORS))
@requires_role("admin")
async def reset_prefix_cache(server: ReadyServer) -> Response:
    await server.run_to_completion(server.activation.reset_prefix_cache())
    return _json({"success": True})


@router.get("/get_world_size", responses=declare_responses({200: JSON}, *ADMIN_ERRORS))
@allow_any_key
async def world_size(server: ReadyServer) -> Response:
    info = server.engine.info
    return _json({"world_size": info.tensor_parallel_size * info.pipeline_parallel_size})


@router.get("/liveness", responses=declare_responses({200: JSON}, EngineGone))
@public
async def liveness(server: AnyServer) -> Response:
    server.readiness.check_alive()
    return _json({"status": "ok"})


def vllm_config(info: EngineInfo) -> dict[str, Any]:
    """Parts of vLLM's configuration that clients read."""
    return {
        "model_config": {
            "model": info.model,
            "dtype": f"torch.{info.dtype}",
            "max_model_len": info.max_context_tokens,
            "logprobs_mode": "processed_logprobs",
        },
        "parallel_config": {
            "tensor_parallel_size": info.tensor_parallel_size,
            "pipeline_parallel_size": info.pipeline_parallel_size,
            "data_parallel_size": 1,
        },
        "cache_config": {"block_size": info.block_size, "enable_prefix_caching": True},
        "lora_config": _lora_config(info),
        "weight_transfer_config": None,
    }


def _lora_config(info: EngineInfo) -> dict[str, Any] | None:
    """LoRA configuration; TRL publishes adapters if it is present, and full models otherwise."""
    if not info.max_adapters:
        return None
    return {"max_lora_rank": info.max_adapter_rank, "max_loras": info.max_adapters}


def _json(value: object) -> Response:
    return Response(to_json(value), media_type="application/json")

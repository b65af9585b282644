"""GET /server_info with the fields that vLLM's and SGLang's clients read."""

from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic_core import to_json

from engine.types import EngineInfo
from service import __version__
from service.auth.access import allow_any_key
from service.compat.vllm_control import vllm_config
from service.http.responses import AUTH_ERRORS, JSON, READINESS_ERRORS, declare_responses
from service.routes.dependencies import ReadyServer

router = APIRouter()

INFO_RESPONSES = declare_responses({200: JSON}, *AUTH_ERRORS, *READINESS_ERRORS)


@router.get("/server_info", responses=INFO_RESPONSES)
@router.get("/get_server_info", responses=INFO_RESPONSES)
@allow_any_key
async def server_info(request: Request, server: ReadyServer) -> Response:
    info = server.engine.info
    content = {
        "vllm_config": vllm_config(info),
        **_sglang(info),
        **_single_node(request),
        "weight_version": server.versions.active.label,
        "version": __version__,
    }
    return Response(to_json(content), media_type="application/json")


def _sglang(info: EngineInfo) -> dict[str, Any]:
    return {
        "model_path": info.model,
        "served_model_name": info.model,
        "dtype": info.dtype,
        "tp_size": info.tensor_parallel_size,
        "pp_size": info.pipeline_parallel_size,
        "dp_size": 1,
        "ep_size": 1,
        "disaggregation_mode": "null",
        "context_length": info.max_context_tokens,
        "page_size": info.block_size,
        "max_running_requests": info.max_sequences,
    }


def _single_node(request: Request) -> dict[str, Any]:
    """Fields that the trainer miles compares with a single-node server that it would launch.

    They include the address.
    """
    return {
        "host": request.url.hostname,
        "port": request.url.port,
        "nnodes": 1,
        "node_rank": 0,
        "base_gpu_id": 0,
        "gpu_id_step": 1,
        "enable_memory_saver": False,
    }

"""Model list, server information and LoRA adapters in the APIs of OpenAI, vLLM and SGLang.

Clients of several servers share them. Those that load an adapter send no version, so different
content under a known name becomes its next version. Content that the name already has is treated as
a retry and changes nothing.
"""

import time
import uuid
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from engine.types.info import EngineInfo
from service import __version__
from service.adapters.manager import LoadedAdapter
from service.auth.access import allow_any_key, requires_role
from service.compat.bodies import CompatModel, Directory, request_body
from service.compat.errors import OpenAIRoute
from service.http.params import label
from service.http.responses import json_response
from service.routes.dependencies import ReadyServer
from service.server import Server

openai = APIRouter(route_class=OpenAIRoute)
router = APIRouter()
_PERMISSION = {
    "allow_create_engine": False,
    "allow_sampling": True,
    "allow_logprobs": True,
    "allow_search_indices": False,
    "allow_view": True,
    "allow_fine_tuning": False,
    "organization": "*",
    "group": None,
    "is_blocking": False,
}


class LoadBody(CompatModel):
    """Request body of the routes that load a LoRA adapter.

    `load_inplace` replaces an adapter of the same name; without it a name in use is rejected.
    """

    lora_name: str
    lora_path: Directory
    load_inplace: bool = False


class UnloadBody(CompatModel):
    lora_name: str


@openai.get("/v1/models")
@allow_any_key
async def models(server: ReadyServer) -> Response:
    return json_response({"object": "list", "data": _cards(server)})


@router.get("/server_info")
@router.get("/get_server_info")
@allow_any_key
async def server_info(request: Request, server: ReadyServer) -> Response:
    info = server.engine.info
    content = {
        "vllm_config": _vllm_config(info),
        **_sglang_config(info),
        **_single_node(request),
        "weight_version": server.versions.active.label,
        "version": __version__,
    }
    return json_response(content)


@router.post("/v1/load_lora_adapter", openapi_extra=request_body(LoadBody))
@requires_role("admin")
async def load(request: Request, server: ReadyServer) -> Response:
    """Load a LoRA adapter like vLLM, with a response in plain text."""
    body = await server.bodies.read_json(request, LoadBody)
    await _load(server, body, replace=body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", openapi_extra=request_body(UnloadBody))
@requires_role("admin")
async def unload(request: Request, server: ReadyServer) -> Response:
    body = await server.bodies.read_json(request, UnloadBody)
    await _unload(server, body)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@router.post("/load_lora_adapter", openapi_extra=request_body(LoadBody))
@requires_role("admin")
async def load_replacing(request: Request, server: ReadyServer) -> Response:
    """Load or replace a LoRA adapter, for trainers that use prime-rl or SGLang.

    These trainers use one name for the adapters of all steps.
    """
    body = await server.bodies.read_json(request, LoadBody)
    adapter = await _load(server, body, replace=True)
    return json_response(
        {"status": "ok", **_loaded_adapters(server), "adapter_version": adapter.version}
    )


@router.post("/unload_lora_adapter", openapi_extra=request_body(UnloadBody))
@requires_role("admin")
async def unload_sglang(request: Request, server: ReadyServer) -> Response:
    await _unload(server, await server.bodies.read_json(request, UnloadBody))
    return json_response({"status": "ok", **_loaded_adapters(server)})


def _cards(server: Server) -> list[dict[str, Any]]:
    info = server.engine.info
    adapters = [
        {**_card(info, adapter.name), "root": adapter.label, "parent": info.model}
        for adapter in server.adapters.current()
    ]
    return [_card(info, info.model), *adapters]


def _card(info: EngineInfo, name: str) -> dict[str, Any]:
    """A model as vLLM's server describes it, without the path of its files."""
    created = int(time.time())
    permission = {
        "id": f"modelperm-{uuid.uuid4().hex[:16]}",
        "object": "model_permission",
        "created": created,
        **_PERMISSION,
    }
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": info.model,
        "parent": None,
        "max_model_len": info.max_context_tokens,
        "permission": [permission],
    }


def _vllm_config(info: EngineInfo) -> dict[str, Any]:
    """Server information in the form of vLLM's configuration: the fields that clients read."""
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
            "data_parallel_size": info.data_parallel_size,
        },
        "cache_config": {"block_size": info.block_size, "enable_prefix_caching": True},
        "lora_config": _lora_config(info),
        "weight_transfer_config": None,
    }


def _lora_config(info: EngineInfo) -> dict[str, Any] | None:
    """LoRA limits in the server information; if None, TRL publishes full models, not adapters."""
    if not info.max_adapters:
        return None
    return {"max_lora_rank": info.max_adapter_rank, "max_loras": info.max_adapters}


def _sglang_config(info: EngineInfo) -> dict[str, Any]:
    return {
        "model_path": info.model,
        "served_model_name": info.model,
        "dtype": info.dtype,
        "tp_size": info.tensor_parallel_size,
        "pp_size": info.pipeline_parallel_size,
        "dp_size": info.data_parallel_size,
        "ep_size": 1,
        "disaggregation_mode": "null",
        "context_length": info.max_context_tokens,
        "page_size": info.block_size,
        "max_running_requests": info.max_sequences * info.data_parallel_size,
    }


def _single_node(request: Request) -> dict[str, Any]:
    """Server information that the RL trainer miles expects from a single-node server.

    miles compares it with a server that it would launch itself. The fields include the address.
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


async def _load(server: Server, body: LoadBody, *, replace: bool) -> LoadedAdapter:
    name = label(body.lora_name, "lora_name")
    work = server.adapters.load(name, None, body.lora_path, replace=replace)
    adapter, _ = await server.run_to_completion(work)
    return adapter


async def _unload(server: Server, body: UnloadBody) -> None:
    work = server.adapters.unload(label(body.lora_name, "lora_name"))
    await server.run_to_completion(work)


def _loaded_adapters(server: Server) -> dict[str, object]:
    return {
        "success": True,
        "loaded_adapters": {adapter.name: adapter.label for adapter in server.adapters.current()},
    }

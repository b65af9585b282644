"""Routes of other servers that are not supported; their errors name the alternative."""

from fastapi import APIRouter, Response

from service.auth.access import allow_any_key, requires_role
from service.compat.openai_route import OpenAIRoute, as_openai
from service.http.errors import InvalidJson, Unsupported
from service.http.responses import AUTH_ERRORS, declare_responses

REFUSED = as_openai(declare_responses({}, *AUTH_ERRORS, InvalidJson, Unsupported))

NCCL = (
    "weights do not come over NCCL: publish them over HTTP (coppice.integrations.trl.install(), or "
    "PUT /v1/weights), or name a directory of safetensors files as weight_dir"
)
TENSORS = (
    "weights come neither over NCCL nor as pickled tensors: publish them over HTTP (PUT "
    "/v1/weights), or name a directory with POST /update_weights_from_disk"
)
ADAPTER_TENSORS = (
    "adapters do not come as pickled tensors: name a directory with POST /load_lora_adapter, or "
    "upload one with PUT /v1/adapters"
)
MEMORY = "memory is not given back: the engine has its device to itself"
RPC = (
    "no method of the workers is called from outside: publish weights with PUT /v1/weights, or "
    "name a directory with POST /update_weights"
)
SKYRL = (
    "SkyRL's own routes are not served: send token ids to /inference/v1/generate, and publish "
    "weights with PUT /v1/weights, or as vLLM's POST /update_weights takes them"
)
GENERATIVE = "only a generative model is served: ask an embedding server"
OTHER_CHAT = "not served: use /v1/chat/completions"
RENDER = "only text models are served: send token ids to /v1/completions or /inference/v1/generate"

_VLLM = {
    "/init_weight_transfer_engine": NCCL,
    "/init_broadcaster": NCCL,
    "/sleep": MEMORY,
    "/wake_up": MEMORY,
    "/collective_rpc": RPC,
    "/v1/chat/completions/render": RENDER,
}
_SGLANG = {
    "/init_weights_update_group": TENSORS,
    "/update_weights_from_distributed": TENSORS,
    "/update_weights_from_tensor": TENSORS,
    "/update_weights_from_ipc": TENSORS,
    "/pull_weights": TENSORS,
    "/load_lora_adapter_from_tensors": ADAPTER_TENSORS,
    "/release_memory_occupation": MEMORY,
    "/resume_memory_occupation": MEMORY,
}


_OPENAI = {
    **dict.fromkeys(("/v1/embeddings", "/v1/rerank", "/pooling", "/classify"), GENERATIVE),
    **dict.fromkeys(("/v1/responses", "/v1/messages"), OTHER_CHAT),
}


def _router(refusals: dict[str, str]) -> APIRouter:
    router = APIRouter()
    for path, suggestion in refusals.items():
        _add_refusal(router, path, suggestion)
    return router


def _add_refusal(router: APIRouter, path: str, suggestion: str) -> None:
    @router.post(path, responses=declare_responses({}, *AUTH_ERRORS, Unsupported))
    @requires_role("admin")
    async def refuse() -> Response:
        raise Unsupported(suggestion)


def _callers_router(refusals: dict[str, str]) -> APIRouter:
    router = APIRouter(route_class=OpenAIRoute)
    for path, suggestion in refusals.items():
        _refuse_callers(router, path, suggestion)
    return router


def _refuse_callers(router: APIRouter, path: str, suggestion: str) -> None:
    @router.get(path, responses=REFUSED)
    @router.post(path, responses=REFUSED)
    @allow_any_key
    async def refuse() -> Response:
        raise Unsupported(suggestion)


def _refuse_below(router: APIRouter, path: str, suggestion: str) -> None:
    @router.get(path, responses=REFUSED)
    @router.post(path, responses=REFUSED)
    @allow_any_key
    async def refuse(rest: str) -> Response:
        raise Unsupported(suggestion)


openai = _callers_router(_OPENAI)
skyrl = APIRouter(route_class=OpenAIRoute)
_refuse_below(skyrl, "/skyrl/v1/{rest:path}", SKYRL)
vllm = _router(_VLLM)
sglang = _router(_SGLANG)

"""Routes of other servers' APIs that are refused with an error that names the alternative."""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Response

from service.auth.access import allow_any_key, requires_role
from service.compat.openai_errors import OpenAIRoute, as_openai
from service.errors import InvalidJson, Unsupported
from service.http.responses import AUTH_ERRORS, declare_responses

NCCL = (
    "weight transfer over NCCL is not supported: publish the weights over HTTP "
    "(coppice.integrations.trl.install(), or PUT /v1/weights), or send the path of a directory of "
    "safetensors files as weight_dir"
)
_TENSORS = (
    "weight transfer over NCCL and as pickled tensors is not supported: publish the weights over "
    "HTTP (PUT /v1/weights), or send the path of a directory to POST /update_weights_from_disk"
)
_ADAPTER_TENSORS = (
    "adapters as pickled tensors are not supported: send the path of a directory to POST "
    "/load_lora_adapter, or upload the adapter with PUT /v1/adapters"
)
_RPC = (
    "calls of worker methods are not supported: publish weights with PUT /v1/weights, or send the "
    "path of a directory to POST /update_weights"
)
SKYRL = (
    "SkyRL's own routes are not supported: send token ids to /inference/v1/generate, and publish "
    "weights with PUT /v1/weights, or with vLLM's POST /update_weights"
)
_GENERATIVE = "only a generative model is served: send the request to an embedding server"
_CANCEL = "responses do not run in the background: close the connection to cancel one"
_ITEMS = "not supported: the client has the input that it sent"
_COUNT = "not supported: use /tokenize with messages, or /v1/messages/count_tokens"
_COMPACT = "conversations are not compacted: send a shorter input"
_RENDER = "not supported: use /tokenize with messages, and send its token ids to /v1/completions"

VLLM_ROUTES = {
    "/init_weight_transfer_engine": NCCL,
    "/init_broadcaster": NCCL,
    "/collective_rpc": _RPC,
    "/v1/chat/completions/render": _RENDER,
}
SGLANG_ROUTES = {
    "/init_weights_update_group": _TENSORS,
    "/update_weights_from_distributed": _TENSORS,
    "/update_weights_from_tensor": _TENSORS,
    "/update_weights_from_ipc": _TENSORS,
    "/pull_weights": _TENSORS,
    "/load_lora_adapter_from_tensors": _ADAPTER_TENSORS,
}
OPENAI_ROUTES = {
    **dict.fromkeys(("/v1/embeddings", "/v1/rerank", "/pooling", "/classify"), _GENERATIVE),
    "/v1/responses/input_tokens": _COUNT,
    "/v1/responses/compact": _COMPACT,
    "/v1/responses/{response_id}/cancel": _CANCEL,
    "/v1/responses/{response_id}/input_items": _ITEMS,
}
_ADMIN_RESPONSES = declare_responses({}, *AUTH_ERRORS, Unsupported)
_CALLER_RESPONSES = as_openai(declare_responses({}, *AUTH_ERRORS, InvalidJson, Unsupported))


def _refusal(suggestion: str) -> Callable[[], Awaitable[Response]]:
    async def refuse() -> Response:
        raise Unsupported(suggestion)

    return refuse


def _refusal_of_response(suggestion: str) -> Callable[[str], Awaitable[Response]]:
    async def refuse(response_id: str) -> Response:
        raise Unsupported(suggestion)

    return refuse


def _admin_routes(suggestions: dict[str, str]) -> APIRouter:
    router = APIRouter()
    for path, suggestion in suggestions.items():
        refuse = requires_role("admin")(_refusal(suggestion))
        router.post(path, responses=_ADMIN_RESPONSES)(refuse)
    return router


def _caller_routes(suggestions: dict[str, str]) -> APIRouter:
    router = APIRouter(route_class=OpenAIRoute)
    for path, suggestion in suggestions.items():
        of_response = "{response_id}" in path
        refuse = _refusal_of_response(suggestion) if of_response else _refusal(suggestion)
        allow_any_key(refuse)
        router.get(path, responses=_CALLER_RESPONSES)(refuse)
        router.post(path, responses=_CALLER_RESPONSES)(refuse)
    return router


openai = _caller_routes(OPENAI_ROUTES)
vllm = _admin_routes(VLLM_ROUTES)
sglang = _admin_routes(SGLANG_ROUTES)
skyrl = APIRouter(route_class=OpenAIRoute)


@skyrl.get("/skyrl/v1/{rest:path}", responses=_CALLER_RESPONSES)
@skyrl.post("/skyrl/v1/{rest:path}", responses=_CALLER_RESPONSES)
@allow_any_key
async def refuse_skyrl(rest: str) -> Response:
    raise Unsupported(SKYRL)

"""Routes of vLLM and SGLang that are refused with an error that names the alternative."""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Response

from service.auth.access import requires_role
from service.errors import Unsupported

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


def _refused(routes: dict[str, str]) -> APIRouter:
    router = APIRouter()
    for path, suggestion in routes.items():
        router.post(path)(requires_role("admin")(_refusal(suggestion)))
    return router


def _refusal(suggestion: str) -> Callable[[], Awaitable[Response]]:
    async def refuse() -> Response:
        raise Unsupported(suggestion)

    return refuse


vllm = _refused(
    {
        "/init_weight_transfer_engine": NCCL,
        "/init_broadcaster": NCCL,
        "/collective_rpc": _RPC,
    }
)
sglang = _refused(
    {
        "/init_weights_update_group": _TENSORS,
        "/update_weights_from_distributed": _TENSORS,
        "/update_weights_from_tensor": _TENSORS,
        "/update_weights_from_ipc": _TENSORS,
        "/pull_weights": _TENSORS,
        "/load_lora_adapter_from_tensors": _ADAPTER_TENSORS,
    }
)

"""Routes of OpenAI's, Anthropic's and vLLM's APIs that vLLM's own serving classes answer.

Their requests and responses are described in vLLM's documentation. The extra field `weights`
constrains the weights version; the engine's OpenAI server reads the others.
"""

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Response
from pydantic import BaseModel, RootModel, TypeAdapter, ValidationError

from coppice.wire.rollouts import WeightsConstraint
from engine.protocol.openai_server import Api, OpenAIServer
from service.auth.access import requires_role
from service.cluster.registry import new_rollout_id, replica_id_of
from service.compat.bodies import BODY_MODELS, SCHEMA_REFERENCE, body_reference
from service.compat.errors import AnthropicRoute, OpenAIRoute
from service.compat.event_stream import KEEP_ALIVE, EventStreamResponse
from service.compat.serving.call import Serving, ServingCall
from service.errors import InvalidRequest, NotFound
from service.http.bodies import INLINE_BYTES
from service.http.exception_handlers import cancel_on_disconnect
from service.http.responses import JSON

openai = APIRouter(route_class=OpenAIRoute)
anthropic = APIRouter(route_class=AnthropicRoute)
vllm = APIRouter(route_class=OpenAIRoute)

MAX_TOKENIZER_BYTES = 2**20
"""Largest body of the tokenizer's routes: several times the longest contexts."""
RESPONSE_ID = "resp_"
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_WEIGHTS = TypeAdapter[WeightsConstraint | None](WeightsConstraint | None)


_SAMPLING: frozenset[Api] = frozenset(
    ("chat/completions", "completions", "responses", "messages", "generate")
)


class JsonObject(RootModel[dict[str, Any]]):
    """Body of a request that vLLM's models parse."""


class ExtraFields(BaseModel):
    """Fields of requests for samples that vLLM 0.32 does not have."""

    weights: WeightsConstraint | None = None
    return_support: bool | None = False
    return_weight_versions: bool | None = False


BODY_MODELS[ExtraFields.__name__] = ExtraFields


def request_schemas(openai_server: OpenAIServer) -> dict[str, Any]:
    """Schemas for the OpenAPI document: those of vLLM's models, with the extra fields."""
    of_apis, others = openai_server.schemas()
    extra = {"$ref": SCHEMA_REFERENCE.format(model=ExtraFields.__name__)}
    schemas = {
        _schema_name(api): {"allOf": [schema, extra]} if api in _SAMPLING else schema
        for api, schema in of_apis.items()
    }
    return {**others, **schemas}


def _schema_name(api: Api) -> str:
    return f"{api.replace('/', '.')}.request"


@openai.get("/v1/responses/{response_id}")
@requires_role("rollout")
async def get_response(response_id: str, call: Serving) -> Response:
    await _check_local(call, response_id)
    stored = call.stored_response(response_id)
    if stored is None:
        raise NotFound("no response of this id is stored")
    return Response(stored.response, media_type=JSON[0])


@openai.delete("/v1/responses/{response_id}")
@requires_role("rollout")
async def delete_response(response_id: str, call: Serving) -> Mapping[str, Any]:
    await _check_local(call, response_id)
    if not call.responses.delete(call.response_name(response_id)):
        raise NotFound("no response of this id is stored")
    return {"id": response_id, "object": "response", "deleted": True}


async def _respond(
    call: ServingCall,
    api: Api,
    *,
    limit: int | None,
    keep_alive: bytes,
) -> Response:
    server, openai_server = call.server, call.server.engine.openai_server
    body = (await server.bodies.read_json(call.request, JsonObject, limit=limit)).root
    request_id = None
    if api == "responses":
        # The id names the replica, to which requests that continue the response are redirected.
        request_id = f"{RESPONSE_ID}{new_rollout_id(server.cluster.own_id)}"
        await _check_local(call, body.get("previous_response_id"))
    if api == "messages" and body.get("thread") is not None:
        # vLLM ignores the field, so that the prompt would not have the earlier messages.
        raise InvalidRequest.of_parameter("thread", "not supported: send all messages")
    call.weights = _weights(body.pop("weights", None))
    if int(call.request.headers.get("content-length", INLINE_BYTES + 1)) <= INLINE_BYTES:
        request = openai_server.parse(api, body, request_id)
    else:
        request = await server.threads.run(
            "bodies", 0, lambda: openai_server.parse(api, body, request_id)
        )
    work = openai_server.respond(request, call)
    response = await cancel_on_disconnect(call.request, work)
    if response.events is not None:
        return EventStreamResponse(response.events, keep_alive)
    return Response(response.content, status_code=response.status, media_type=JSON[0])


async def _check_local(call: ServingCall, response_id: object) -> None:
    """Redirect to the replica that has sampled the response, if it is another one.

    The responses of a session that was moved here are not stored anywhere any more.
    """
    if not isinstance(response_id, str) or call.session_call is not None:
        return
    replica_id = replica_id_of(response_id.removeprefix(RESPONSE_ID))
    if replica_id is not None:
        await call.server.cluster.check_local(replica_id)


def _weights(given: object) -> WeightsConstraint | None:
    try:
        return _WEIGHTS.validate_python(given)
    except ValidationError as error:
        raise InvalidRequest.of_parameter(
            "weights", "give exactly one of exact_version and min_version"
        ) from error


def _add(
    router: APIRouter, path: str, api: Api, *, limit: int | None = None, ping: bytes = KEEP_ALIVE
) -> None:
    async def respond(call: Serving) -> Response:
        return await _respond(call, api, limit=limit, keep_alive=ping)

    is_anthropic = router is anthropic
    body = body_reference(_schema_name(api))
    router.post(path, openapi_extra=body)(requires_role("rollout", x_api_key=is_anthropic)(respond))


_add(openai, "/v1/chat/completions", "chat/completions")
_add(openai, "/v1/completions", "completions")
_add(openai, "/v1/responses", "responses")
_add(anthropic, "/v1/messages", "messages", ping=PING)
_add(anthropic, "/v1/messages/count_tokens", "messages/count_tokens")
_add(vllm, "/inference/v1/generate", "generate")
_add(vllm, "/tokenize", "tokenize", limit=MAX_TOKENIZER_BYTES)
_add(vllm, "/detokenize", "detokenize", limit=MAX_TOKENIZER_BYTES)

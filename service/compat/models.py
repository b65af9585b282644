"""GET /v1/models: the served model and its adapters, in the format of OpenAI and vLLM."""

from typing import Any

from fastapi import APIRouter, Response
from pydantic_core import to_json

from engine.types import EngineInfo
from service.auth.access import allow_any_key
from service.compat import events
from service.compat.openai_route import OpenAIRoute
from service.compat.rollout_adapter import name_of
from service.http.errors import NotFound
from service.http.responses import AUTH_ERRORS, JSON, READINESS_ERRORS, declare_responses
from service.routes.dependencies import ReadyServer
from service.server import Server

router = APIRouter(route_class=OpenAIRoute)


@router.get("/v1/models", responses=declare_responses({200: JSON}, *AUTH_ERRORS, *READINESS_ERRORS))
@allow_any_key
async def models(server: ReadyServer) -> Response:
    return _json({"object": "list", "data": _cards(server)})


@router.get(
    "/v1/models/{model:path}",
    responses=declare_responses({200: JSON}, *AUTH_ERRORS, *READINESS_ERRORS, NotFound),
)
@allow_any_key
async def model(model: str, server: ReadyServer) -> Response:
    name = name_of(server, model)
    card = next((card for card in _cards(server) if card["id"] == name), None)
    if card is None:
        raise NotFound("no model of this name is served: GET /v1/models lists them")
    return _json(card)


def _cards(server: Server) -> list[dict[str, Any]]:
    info = server.engine.info
    adapters = [
        {**_card(info, adapter.name), "root": adapter.label, "parent": info.model}
        for adapter in server.adapters.current()
    ]
    return [_card(info, info.model), *adapters]


def _json(value: object) -> Response:
    return Response(to_json(value), media_type="application/json")


def _card(info: EngineInfo, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": events.unix_time(),
        "owned_by": "coppice",
        "root": info.model,
        "parent": None,
        "max_model_len": info.max_context_tokens,
    }

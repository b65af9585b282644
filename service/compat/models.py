"""GET /v1/models: what is served, adapters too, as OpenAI's and vLLM's clients ask for it."""

from typing import Any

from fastapi import APIRouter, Response
from pydantic_core import to_json

from engine.protocol import EngineFacts
from service.access import any_key
from service.answers import JSON, WHEN_READY, WITH_KEY, answers
from service.compat import events
from service.compat.openai_route import OpenAIRoute
from service.routes.dependencies import ReadyServer

router = APIRouter(route_class=OpenAIRoute)


@router.get("/v1/models", responses=answers({200: JSON}, *WITH_KEY, *WHEN_READY))
@any_key
async def models(server: ReadyServer) -> Response:
    facts = server.engine.facts
    base = _card(facts, facts.model)
    adapters = [
        {**_card(facts, held.name), "root": held.label, "parent": facts.model}
        for held in server.adapters.current()
    ]
    listed = {"object": "list", "data": [base, *adapters]}
    return Response(to_json(listed), media_type="application/json")


def _card(facts: EngineFacts, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": events.now(),
        "owned_by": "coppice",
        "root": facts.model,
        "parent": None,
        "max_model_len": facts.max_context_tokens,
    }

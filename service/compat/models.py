"""GET /v1/models: what is served, as OpenAI's and vLLM's clients ask for it."""

from fastapi import APIRouter, Response
from pydantic_core import to_json

from service.access import any_key
from service.answers import JSON, WHEN_READY, WITH_KEY, answers
from service.compat import events
from service.routes.dependencies import ReadyServer

router = APIRouter()


@router.get("/v1/models", responses=answers({200: JSON}, *WITH_KEY, *WHEN_READY))
@any_key
async def models(server: ReadyServer) -> Response:
    facts = server.engine.facts
    model = {
        "id": facts.model,
        "object": "model",
        "created": events.now(),
        "owned_by": "coppice",
        "root": facts.model,
        "parent": None,
        "max_model_len": facts.max_context_tokens,
    }
    return Response(to_json({"object": "list", "data": [model]}), media_type="application/json")

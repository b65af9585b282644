"""POST /tokenize and POST /detokenize as in vLLM."""

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field
from pydantic_core import to_json

from coppice.wire.base import TokenIds
from service.auth.access import requires_role
from service.compat.bodies import CompatModel, Flag, read_compat_body
from service.compat.chat import ChatBody, ChatMessage, Tool
from service.compat.openai_route import OpenAIRoute, as_openai
from service.compat.openapi_document import request_body
from service.compat.rollout_adapter import resolve_adapter
from service.http.errors import AdapterNotFound, InvalidRequest, NoChatTemplate
from service.http.responses import (
    AUTH_ERRORS,
    BODY_ERRORS,
    JSON,
    READINESS_ERRORS,
    declare_responses,
)
from service.routes.dependencies import ReadyServer
from service.server import Server

router = APIRouter(route_class=OpenAIRoute)

MAX_BODY_BYTES = 2**20
"""Several times the size of the longest contexts; all callers share one tokenizer thread."""
TOKENIZE_ERRORS = (*AUTH_ERRORS, *READINESS_ERRORS, *BODY_ERRORS, AdapterNotFound, NoChatTemplate)
TOKENIZED = as_openai(declare_responses({200: JSON}, *TOKENIZE_ERRORS))


class TokenizeBody(CompatModel):
    """Body of a tokenize request: a text in `prompt`, or chat `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: Flag = False
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=1024)] | None = None

    def chat(self) -> ChatBody:
        assert self.messages is not None, "the chat form"
        return ChatBody(
            messages=self.messages,
            tools=self.tools,
            chat_template_kwargs=self.chat_template_kwargs,
            add_generation_prompt=self.add_generation_prompt,
        )


class DetokenizeBody(CompatModel):
    model: str | None = None
    tokens: TokenIds


@router.post("/tokenize", responses=TOKENIZED, openapi_extra=request_body(TokenizeBody))
@requires_role("rollout")
async def tokenize(request: Request, server: ReadyServer) -> Response:
    body = await read_compat_body(request, TokenizeBody, server, limit=MAX_BODY_BYTES)
    resolve_adapter(server, body.model)
    tokens = await _tokens(server, body)
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": server.engine.info.max_context_tokens,
        "tokens": tokens,
        "token_strs": await server.tokenizer.pieces(tokens) if body.return_token_strs else None,
    }
    return _json(answer)


@router.post("/detokenize", responses=TOKENIZED, openapi_extra=request_body(DetokenizeBody))
@requires_role("rollout")
async def detokenize(request: Request, server: ReadyServer) -> Response:
    body = await read_compat_body(request, DetokenizeBody, server, limit=MAX_BODY_BYTES)
    resolve_adapter(server, body.model)
    info = server.engine.info
    if len(body.tokens) > info.max_context_tokens:
        raise InvalidRequest.of_parameter("tokens", f"at most {info.max_context_tokens}")
    if max(body.tokens, default=0) >= info.vocab_size:
        raise InvalidRequest.of_parameter("tokens", f"token ids must be below {info.vocab_size}")
    return _json({"prompt": await server.tokenizer.whole_text(body.tokens)})


async def _tokens(server: Server, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest.of_parameter("prompt", "give either prompt or messages")
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        return await server.tokenizer.encoded(body.prompt, add_special_tokens=special)
    if body.add_special_tokens:
        raise InvalidRequest.of_parameter(
            "add_special_tokens", "not with messages: the chat template writes the special tokens"
        )
    return await server.tokenizer.rendered(body.chat().chat_request())


def _json(value: object) -> Response:
    return Response(to_json(value), media_type="application/json")

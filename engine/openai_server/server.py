"""vLLM's serving classes for OpenAI's and Anthropic's APIs, over samples that the service starts.

A copy of a serving object, with its own engine client, renderer and models, serves each request.
"""

import asyncio
import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import to_json
from vllm.config import VllmConfig
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.responses.api_router import _convert_stream_to_sse_events
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.exceptions import VLLMValidationError
from vllm.renderers import BaseRenderer
from vllm.renderers.online_renderer import OnlineRenderer

from engine.errors import ConversationRefused
from engine.launch.chat_template import load_template
from engine.openai_server import errors
from engine.openai_server.engine_client import RolloutEngineClient, started_events
from engine.openai_server.extra_fields import ExtraFields
from engine.openai_server.large_steps import LargeStepsInThreads
from engine.openai_server.request_models import MODELS, validated
from engine.openai_server.served_models import ServedModels
from engine.openai_server.session_prompts import recording_parser, session_renderer
from engine.openai_server.stored_responses import StoredMessages, StoredResponses
from engine.openai_server.whole_inputs import WholeInputs
from engine.protocol.openai_server import Api, ApiCall, ApiResponse
from engine.requests import images
from engine.requests.chat_template_kwargs import template_options, template_variables
from engine.requests.images import MAX_DECODING
from engine.settings import EngineSettings

METHODS: Mapping[Api, str] = {
    "chat/completions": "create_chat_completion",
    "completions": "create_completion",
    "responses": "create_responses",
    "messages": "create_messages",
    "messages/count_tokens": "count_tokens",
    "generate": "serve_tokens",
    "tokenize": "create_tokenize",
    "detokenize": "create_detokenize",
}
INTERNAL_FIELDS = ("kv_transfer_params", "ec_transfer_params", "vllm_xargs")
"""Fields that control the engine's internals; no caller can set them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest:
    """A request of one of the APIs, as vLLM parses it."""

    api: Api
    body: Any
    given: frozenset[str]
    extra: ExtraFields


class VllmOpenAIServer:
    """The `engine.protocol.openai_server.OpenAIServer` of vLLM."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        renderer: BaseRenderer,
        settings: EngineSettings,
    ) -> None:
        self._renderer = renderer
        self._vllm_config = vllm_config = copy.copy(vllm_config)
        vllm_config.model_config = model = copy.copy(vllm_config.model_config)
        model.max_logprobs = settings.max_logprobs  # the engine also records those of entropies
        self._model = (model.served_model_name, model.model)
        chat_template = load_template(settings.chat_template)
        self._template_variables = template_variables(renderer, model, chat_template)
        parsers = {
            "tool_parser": settings.tool_parser,
            "reasoning_parser": settings.reasoning_parser or "",
            "enable_auto_tools": settings.tool_parser is not None,
        }
        chat: Any = {"chat_template": chat_template, "chat_template_content_format": "auto"}
        self._image_turns = asyncio.Semaphore(MAX_DECODING)
        self._serving = self._serving_objects(chat, parsers)

    def _serving_objects(self, chat: Any, parsers: Any) -> Mapping[Api, Any]:
        """The objects that are copied for each request."""
        vllm_config, renderer = self._vllm_config, self._renderer
        online_renderer = OnlineRenderer(
            vllm_config.model_config,
            WholeInputs(renderer),
            request_logger=None,
            **chat,
            **parsers,
        )
        nobody: Any = None
        common: Any = {
            "engine_client": RolloutEngineClient(vllm_config, renderer, nobody),
            "models": ServedModels(*self._model, nobody),
            "online_renderer": online_renderer,
            "request_logger": None,
            "enable_prompt_tokens_details": True,
        }
        message: Any = {**common, "response_role": "assistant", **chat, **parsers}
        messages = AnthropicServingMessages(**message)
        tokenization = ServingTokenization(
            common["models"], online_renderer, request_logger=None, **chat
        )
        return {
            "chat/completions": OpenAIServingChat(**message),
            "completions": OpenAIServingCompletion(**common),
            "responses": OpenAIServingResponses(**common, **chat, **parsers),
            "messages": messages,
            "messages/count_tokens": messages,
            "generate": ServingTokens(**common),
            "tokenize": tokenization,
            "detokenize": tokenization,
        }

    def parse(
        self, api: Api, body: Mapping[str, Any], request_id: str | None = None
    ) -> ApiRequest | ApiResponse:
        """A request of a body in JSON; an error response if it is not valid."""
        fields = {name: value for name, value in body.items() if name not in INTERNAL_FIELDS}
        try:
            extra = ExtraFields.taken_from(fields)
            _check_media(fields)
            parsed = validated(api, fields)
            _check(parsed)
            self._check_template_kwargs(getattr(parsed, "chat_template_kwargs", None))
            if request_id is not None:
                parsed.request_id = request_id
        except ValidationError as error:
            return errors.validation_response(error)
        except errors.OF_REQUESTS as error:
            return errors.parse_response(error)
        return ApiRequest(api=api, body=parsed, given=_given(fields, parsed), extra=extra)

    def _check_template_kwargs(self, given: Mapping[str, Any] | None) -> None:
        """Refuse values that exhaust memory: arguments of the tokenizer, and long ones."""
        try:
            template_options(given or {}, self._template_variables)
        except ConversationRefused as error:
            raise VLLMValidationError(str(error), parameter=error.field) from error

    def schemas(self) -> tuple[Mapping[Api, Any], Mapping[str, Any]]:
        found, others = TypeAdapter.json_schemas(
            [(api, "validation", model) for api, model in MODELS.items()],
            ref_template="#/components/schemas/vllm.{model}",
        )
        definitions = others.get("$defs", {})
        return (
            {api: schema for (api, _), schema in found.items()},
            {f"vllm.{name}": schema for name, schema in definitions.items()},
        )

    async def respond(self, request: ApiRequest | ApiResponse, call: ApiCall) -> ApiResponse:
        if isinstance(request, ApiResponse):
            return request
        client = RolloutEngineClient(
            self._vllm_config,
            self._renderer,
            call,
            request.given,
            return_support=request.extra.return_support,
            echoes=bool(getattr(request.body, "echo", False)),
            returns_text=getattr(request.body, "output_mode", "text") == "text",
            turns=self._image_turns,
        )
        try:
            serving = await self._copy(request, call, client)
            work = getattr(serving, METHODS[request.api])(request.body, None)
            with images.within(client.images):
                found = await LargeStepsInThreads(work, lambda: client.has_large_result)
        except errors.OF_REQUESTS as error:
            client.close()
            return errors.response(request.api, error)
        except BaseException:
            client.close()
            raise
        if isinstance(found, BaseModel):
            client.close()
            if client.has_large_result:
                return await asyncio.to_thread(_response, request, found, client)
            return _response(request, found, client)
        events = _convert_stream_to_sse_events(found) if request.api == "responses" else found
        if request.extra:
            events = request.extra.in_events(events, client.ends)
        return ApiResponse(events=await started_events(events, client))

    async def _copy(self, request: ApiRequest, call: ApiCall, client: RolloutEngineClient) -> Any:
        shared = self._serving[request.api]
        if isinstance(shared, AnthropicServingMessages) and _disables_thinking(request.body):
            await shared._get_disabled_thinking_effort()  # is kept
        serving = copy.copy(shared)
        serving.engine_client = client
        name, path = self._model
        if call.in_session:  # agents send any name
            name = getattr(request.body, "model", None) or name
        serving.models = ServedModels(name, path, call)
        if request.api == "responses":
            messages = StoredMessages(call)
            serving.enable_store = not serving.use_harmony  # whose messages have no JSON
            serving.msg_store, serving.response_store = messages, StoredResponses(call, messages)
        if call.in_session:
            _put_in_session(request, serving, call, client)
        return serving


def _put_in_session(
    request: ApiRequest, serving: Any, call: ApiCall, client: RolloutEngineClient
) -> None:
    """Let the call's session render the prompt, and record the messages that the agent receives."""
    if getattr(request.body, "echo", False):
        raise VLLMValidationError("not supported in a session", parameter="echo")
    serving.online_renderer = session_renderer(serving.online_renderer, call)
    name = "parser" if request.api == "responses" else "parser_cls"
    parser = getattr(serving, name, None)
    if parser is None:
        client.reports_texts = request.api != "completions"
    else:
        # For a streamed chat vLLM makes one parser that is not used for a sample.
        first_index = -1 if name == "parser_cls" and getattr(request.body, "stream", False) else 0
        setattr(serving, name, recording_parser(parser, call, first_index=first_index))


def _given(fields: Mapping[str, Any], request: BaseModel) -> frozenset[str]:
    """Names of the fields of vLLM's model that a request has set; null is the default."""
    names = type(request).model_fields
    params = fields.get("sampling_params")
    own = params if isinstance(params, Mapping) else {}
    given = [*((name, fields[name]) for name in fields.keys() & names.keys()), *own.items()]
    return frozenset(name for name, value in given if value is not None)


def _check(request: BaseModel) -> None:
    if getattr(request, "features", None) is not None:
        raise VLLMValidationError(
            "not supported: send images in content_parts", parameter="features"
        )
    if getattr(request, "background", False):
        raise VLLMValidationError(
            "not supported: wait for the response, or stream it", parameter="background"
        )
    if getattr(request, "use_beam_search", False):
        raise VLLMValidationError(
            "beam search is not supported: use n for several samples", parameter="use_beam_search"
        )


def _check_media(fields: Mapping[str, Any]) -> None:
    """Refuse names of images, under which other callers would get the KV of another image."""
    waiting = [fields.get(name) for name in ("messages", "input", "content_parts")]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            if value.get("uuid") is not None and "type" in value:
                raise VLLMValidationError(
                    "not supported: an image is known by its content", parameter="uuid"
                )
            value = list(value.values())
        if isinstance(value, list):
            waiting += value


def _disables_thinking(request: Any) -> bool:
    return request.thinking is not None and request.thinking.type == "disabled"


def _response(request: ApiRequest, found: BaseModel, client: RolloutEngineClient) -> ApiResponse:
    """The JSON that vLLM's routes send."""
    if isinstance(found, ErrorResponse):
        return errors.as_response(request.api, found)
    is_anthropic = request.api.startswith("messages")
    options: Any = {"exclude_none": is_anthropic, "by_alias": request.api == "responses"}
    if not request.extra:
        return ApiResponse(content=found.model_dump_json(**options).encode())
    value = found.model_dump(mode="json", **options)
    request.extra.add(value, client.ends)
    return ApiResponse(content=to_json(value))

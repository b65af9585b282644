"""Error responses of the APIs, as vLLM's routes and exception handlers write them."""

from typing import Any

from pydantic import ValidationError
from pydantic_core import to_json
from vllm.entrypoints.anthropic.protocol import AnthropicError, AnthropicErrorResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.handlers.validation import (
    _format_error,
    clean_loc_for_param,
)
from vllm.exceptions import VLLMError, VLLMValidationError

from engine.protocol.openai_server import Api, ApiResponse

OF_REQUESTS = (VLLMError, ValueError, TypeError, OverflowError, NotImplementedError)
"""Exceptions that vLLM's routes answer with an error response."""
MAX_REPORTED = 10
"""Errors of a body in the message, as in vLLM."""
MAX_LISTED = 1000
"""pydantic lists either all errors or none, at 2 us each."""


def response(api: Api, error: Exception) -> ApiResponse:
    """Response to an exception of a serving class."""
    return as_response(api, create_error_response(error))


def as_response(api: Api, error: ErrorResponse) -> ApiResponse:
    if not api.startswith("messages"):
        return _openai_response(error)
    translated = AnthropicError(type=error.error.type, message=error.error.message)
    content = to_json(AnthropicErrorResponse(error=translated).model_dump())
    return ApiResponse(status=error.error.code, content=content)


def parse_response(error: Exception) -> ApiResponse:
    """Response to an exception of vLLM's models, which has OpenAI's form on every route."""
    return _openai_response(create_error_response(error))


def _openai_response(error: ErrorResponse) -> ApiResponse:
    return ApiResponse(status=error.error.code, content=to_json(error.model_dump()))


def validation_response(error: ValidationError) -> ApiResponse:
    """Response to a body that is not valid."""
    count = error.error_count()
    listed = error.errors(include_url=False) if count <= MAX_LISTED else []
    # FastAPI, which vLLM's routes use, puts the place of the model before each location.
    found: list[dict[str, Any]] = [{**each, "loc": ("body", *each["loc"])} for each in listed]
    causes = [each.get("ctx", {}).get("error") for each in found]
    param = next((c.parameter for c in causes if isinstance(c, VLLMValidationError)), None)
    if param is None and found:
        param = clean_loc_for_param(found[0]["loc"])
    lines = [f"{count} validation error{'s' if count > 1 else ''}:"]
    lines += [f"  {_format_error(each)}" for each in found[:MAX_REPORTED]]
    if count > MAX_REPORTED:
        lines.append(f"  ...and {count - MAX_REPORTED} more errors")
    message = "\n".join(lines)
    return _openai_response(create_error_response(message, err_type="Bad Request", param=param))

"""Problem documents with the member `error`, the only one that OpenAI's client shows."""

import json
from typing import Any

from coppice.wire.problems import Problem
from service.compat.openai_route import BAD_REQUEST


def to_openai_json(problem: Problem) -> str:
    return json.dumps(with_openai_error(problem))


def with_openai_error(problem: Problem) -> dict[str, Any]:
    """Problem document with OpenAI's `error` object added to its members."""
    field_errors = [f"{fault['location']}: {fault['message']}" for fault in problem.errors or ()]
    wrong = problem.errors[0]["location"] if problem.errors else None
    messages = [text for text in (problem.detail or problem.title, *field_errors) if text]
    error = {
        "message": "; ".join(dict.fromkeys(messages)),
        "type": "invalid_request_error" if problem.status == BAD_REQUEST else problem.code,
        "param": wrong,
        "code": problem.code,
    }
    return {**problem.model_dump(exclude_none=True), "error": error}

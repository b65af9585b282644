"""Requests on the routes that vLLM's serving classes answer, and the parts of their responses."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, GENERATE = "/v1/responses", "/v1/messages", "/inference/v1/generate"
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "abc"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": ASKED, "max_tokens": 4},
    COMPLETIONS: {"prompt": [97, 98, 99], "max_tokens": 4},
    RESPONSES: {"input": "abc", "max_output_tokens": 4},
    MESSAGES: {"model": "fake", "messages": ASKED, "max_tokens": 4},
    GENERATE: {"token_ids": [97, 98, 99], "sampling_params": {"max_tokens": 4}},
}
"""A request with the prompt `abc` on each route."""
PATHS = sorted(BODIES)
WITH_CHOICES = (CHAT, COMPLETIONS, GENERATE)
PROBLEM = "application/problem+json"


def sampled(path: str, **fields: Any) -> dict[str, Any]:
    """The request of a route with further sampling parameters."""
    body = BODIES[path]
    if path == GENERATE:
        return {**body, "sampling_params": {**body["sampling_params"], **fields}}
    return {**body, **fields}


def events_of(text: str) -> list[Any]:
    """The values of a stream but for `[DONE]`."""
    lines = (line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: "))
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def live_events(answer: httpx.Response) -> AsyncIterator[Any]:
    """The values of a stream while it runs, but for `[DONE]`."""
    buffer = b""
    async for content in answer.aiter_bytes():
        *events, buffer = (buffer + content).split(b"\n\n")
        for data in (event.partition(b"data: ")[2] for event in events):
            if data.startswith(b"{"):
                yield json.loads(data)


def ends(path: str, streamed: list[Any]) -> list[dict[str, Any]]:
    """The objects of a stream that have the end of a sample, in the order of the choices."""
    if path == RESPONSES:
        return [event["response"] for event in streamed if event["type"] == "response.completed"]
    if path == MESSAGES:
        return [event for event in streamed if event["type"] == "message_delta"]
    choices = [choice for event in streamed for choice in event["choices"]]
    found = [choice for choice in choices if choice["finish_reason"]]
    return sorted(found, key=lambda choice: int(choice["index"]))


def samples(path: str, answer: Any) -> list[dict[str, Any]]:
    """The objects of a whole response that stand for a sample."""
    return list(answer["choices"]) if path in WITH_CHOICES else [answer]


def message_of(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["message"])


def code_of(answer: httpx.Response) -> str:
    """Code of a problem, which Anthropic's format has in its error."""
    body = answer.json()
    return str(body.get("code") or body["error"].get("code"))

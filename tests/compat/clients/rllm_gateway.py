"""A tool loop of OpenAI's client through rLLM's model gateway, and the gateway's traces of it.

Each argument is a scenario, the path below which the server has `chat/completions`, and the
agent's key, separated by commas.
"""

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from openai import OpenAI
from rllm_model_gateway import GatewayClient, GatewayConfig, create_app

ASKED = "Compute (2 + 3) + (4 + 5)."
STORE_SECONDS = 60.0
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            },
        },
    }
]


@contextmanager
def gateway(url: str, path: str) -> Iterator[str]:
    """The gateway as rLLM embeds it, with one worker."""
    app = create_app(GatewayConfig(store_worker="memory", sync_traces=True))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        with GatewayClient(address) as client:
            client.add_worker(url=url, api_path=path)
        yield address
    finally:
        server.should_exit = True
        thread.join()


def solve(client: OpenAI, *, stream: bool) -> list[dict[str, Any]]:
    """The messages of the tool loop."""
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    while True:
        message = answer(client, messages, stream=stream)
        messages.append(message)
        if "tool_calls" not in message:
            return messages
        for call in message["tool_calls"]:
            total = sum(json.loads(call["function"]["arguments"]).values())
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(total)})


def answer(client: OpenAI, messages: list[Any], *, stream: bool) -> dict[str, Any]:
    asked: dict[str, Any] = {"model": "fake", "messages": messages, "tools": TOOLS}
    if not stream:
        [choice] = client.chat.completions.create(**asked).choices
        message: dict[str, Any] = choice.message.model_dump(exclude_none=True)
        return message
    with client.chat.completions.stream(**asked) as events:
        [choice] = events.get_final_completion().choices
    return {
        key: value for key, value in choice.message.to_dict().items() if value and key != "parsed"
    }


def traces_of(trainer: GatewayClient, session: str, num_responses: int) -> list[Any]:
    """Traces of all responses. The gateway stores those of a stream in a task after its end."""
    due = time.monotonic() + STORE_SECONDS
    while len(traces := trainer.get_session_traces(session)) < num_responses:
        assert time.monotonic() < due, f"{len(traces)} traces of {num_responses} responses"
        time.sleep(0.01)
    return list(traces)


def run(url: str, scenario: str, path: str, key: str) -> dict[str, Any]:
    with gateway(url, path) as address, GatewayClient(address) as trainer:
        session = trainer.create_session()
        with OpenAI(base_url=trainer.get_session_url(session), api_key=key, max_retries=0) as agent:
            messages = solve(agent, stream=scenario.endswith("streamed"))
        num_responses = sum(message["role"] == "assistant" for message in messages)
        traces = traces_of(trainer, session, num_responses)
    return {
        "output": str(messages[-1]["content"]),
        "traces": [
            {"prompt": each.prompt_token_ids, "token_ids": each.completion_token_ids}
            | {"logprobs": each.logprobs, "finish_reason": each.finish_reason}
            for each in traces
        ],
    }


if __name__ == "__main__":
    scenarios = [given.split(",") for given in sys.argv[2:]]
    print(json.dumps({each[0]: run(sys.argv[1], *each) for each in scenarios}))

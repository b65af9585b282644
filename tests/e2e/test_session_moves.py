"""An episode of an agent on two real servers behind nginx, one of which stops between two calls."""

import signal
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from openai import OpenAI

from tests.examples.nginx import nginx
from tests.invariants.service_process import ServiceProcess, home, service, until
from tests.ports import free_port
from tests.redis_server import redis_server

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive]

STOP_SECONDS = 90.0
GREEDY = {"temperature": 0.0, "max_tokens": 12}


def is_ready(server: ServiceProcess) -> bool:
    return httpx.get(f"{server.url}/readyz").status_code == 200


def new_session(server: ServiceProcess) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/v1/sessions", json={"sampling": GREEDY})
    session: dict[str, Any] = answer.json()["sessions"][0]
    return session


def next_turn(session: dict[str, Any], messages: list[Any], text: str) -> list[Any]:
    """The conversation after one more message of the user and the response to it."""
    messages = [*messages, {"role": "user", "content": text}]
    base_url = f"{session['base_url']}/v1"
    with OpenAI(base_url=base_url, api_key=session["key"], timeout=60) as agent:
        answer = agent.chat.completions.create(model="any", messages=messages)
    return [*messages, answer.choices[0].message.model_dump(exclude_none=True)]


def finished(server: ServiceProcess, session: dict[str, Any]) -> dict[str, Any]:
    url = f"{server.url}/v1/sessions/{session['id']}/finish"
    answer: dict[str, Any] = httpx.post(url, json={"reward": 1.0}).json()
    return answer


def test_episode_has_the_tokens_that_it_would_have_without_the_stop(tmp_path: Path) -> None:
    port = free_port()
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(tmp_path))
        servers = {
            name: stack.enter_context(
                service(
                    stack.enter_context(home()),
                    *("--server.advertised-url", f"http://127.0.0.1:{port}/replica/{name}"),
                    *("--cluster.redis-url", redis.url),
                    *("--weights.peers", f"http://127.0.0.1:{port}"),
                )
            )
            for name in "ab"
        }
        places = {f"coppice-{name}": urlsplit(each.url).netloc for name, each in servers.items()}
        stack.enter_context(nginx(tmp_path, places, port=port))
        for server in servers.values():
            until(partial(is_ready, server), seconds=STOP_SECONDS, what="ready")
        moved, whole = new_session(servers["a"]), new_session(servers["b"])
        conversation = next_turn(moved, [], "What is 2 + 3?")
        servers["a"].signal(signal.SIGTERM)
        assert servers["a"].wait(STOP_SECONDS) == 0
        conversation = next_turn(moved, conversation, "And times 4?")
        assert next_turn(whole, next_turn(whole, [], "What is 2 + 3?"), "And times 4?") == (
            conversation
        )
        answers = [finished(servers["b"], session) for session in (moved, whole)]
    trees = [
        [(part["token_ids"], part.get("sampled", True)) for part in answer["groups"][0]["segments"]]
        for answer in answers
    ]
    assert trees[0] == trees[1]
    assert [turn["reason"] for turn in answers[0]["turns"]] == ["new_conversation", "extended"]

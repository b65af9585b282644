"""Keys, limits, disconnects and failures on the routes that vLLM's serving classes answer."""

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.compat import event_stream
from tests.compat.third_party import Foreign, foreign
from tests.compat.wires import (
    ASKED,
    BODIES,
    CHAT,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    PATHS,
    PROBLEM,
    RESPONSES,
    code_of,
    events_of,
    live_events,
    message_of,
    sampled,
)
from tests.fake_engine import FakeEngine
from tests.service.keyfile import bearer, write_keys

STREAM = pytest.mark.parametrize("stream", [False, True])
EACH = pytest.mark.parametrize("path", PATHS)
JSON = {"content-type": "application/json"}
NUM_WRONG = 500_000


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def has_token(event: object, token: int) -> bool:
    """True if an event has a token, by its id or as the text that the fake engine gives it."""
    text = json.dumps(event)
    return json.dumps(chr(token)) in text or f"[{token}]" in text


async def error_of(served: Foreign, path: str, body: object, **options: Any) -> tuple[int, str]:
    answer = await served.http.post(path, json=body, **options)
    return answer.status_code, code_of(answer)


@EACH
async def test_cache_salt_is_private_to_its_key(tmp_path: Path, path: str) -> None:
    file = tmp_path / "keys.yaml"
    secrets = write_keys(file, one="rollout", two="rollout")
    async with foreign(tmp_path, server={"keys_file": file}) as served:
        for secret in secrets.values():
            body = {**BODIES[path], "cache_salt": "7"}
            await served.post(path, body, headers=bearer(secret))
        await served.post(path, BODIES[path], headers=bearer(secrets["one"]))
        salts = [sample.cache_salt for sample in served.engine.submitted]
    assert salts == ["one:7", "two:7", None]


@STREAM
@EACH
async def test_quota_of_a_key_is_enforced_before_a_stream_begins(
    tmp_path: Path, path: str, stream: bool
) -> None:
    limits = {"max_samples_per_key": 1}
    async with foreign(tmp_path, FakeEngine(instant=False), limits=limits) as served:
        body = {**BODIES[path], "stream": stream}
        first = asyncio.create_task(served.http.post(path, json=body))
        await until(lambda: served.engine.running)
        refused = await served.http.post(path, json=body)
        assert (refused.status_code, code_of(refused)) == (429, "quota_exceeded")
        assert int(refused.headers["retry-after"]) > 0
        served.engine.step(9)
        assert (await first).status_code == 200
        assert len(served.engine.submitted) == 1


@STREAM
async def test_prompts_beyond_a_quota_leave_no_samples(tmp_path: Path, stream: bool) -> None:
    """The first prompts of the request have been started."""
    limits = {"max_samples_per_key": 2}
    async with foreign(tmp_path, FakeEngine(instant=False), limits=limits) as served:
        body = {**BODIES[COMPLETIONS], "prompt": [[1], [2], [3]], "stream": stream}
        assert await error_of(served, COMPLETIONS, body) == (429, "quota_exceeded")
        await until(lambda: not served.engine.running)
        await until(lambda: not served.server.rollouts.num_running)


@EACH
async def test_draining_and_dead_servers_refuse_requests(tmp_path: Path, path: str) -> None:
    status = 529 if path == MESSAGES else 503
    async with foreign(tmp_path) as served:
        served.engine.die()
        assert (await error_of(served, path, BODIES[path]))[0] == status
    async with foreign(tmp_path) as served:
        await served.server.drain(0)
        assert await error_of(served, path, BODIES[path]) == (status, "draining")


@STREAM
@EACH
async def test_disconnected_client_ends_its_sample(tmp_path: Path, path: str, stream: bool) -> None:
    async with foreign(tmp_path, FakeEngine(instant=False)) as served:
        body = {**BODIES[path], "stream": stream}
        for num_tokens in (0, 2):
            request = asyncio.create_task(served.http.post(path, json=body))
            await until(lambda: served.engine.running)
            served.engine.step(num_tokens)
            await asyncio.sleep(0.01)
            request.cancel()
            await until(lambda: not served.engine.running)


async def test_disconnected_client_ends_the_samples_of_all_prompts(tmp_path: Path) -> None:
    async with foreign(tmp_path, FakeEngine(instant=False)) as served:
        for stream in (False, True):
            body = {**BODIES[COMPLETIONS], "prompt": [[1], [2]], "n": 2, "stream": stream}
            request = asyncio.create_task(served.http.post(COMPLETIONS, json=body))
            await until(lambda: len(served.engine.running) == 4)
            request.cancel()
            await until(lambda: not served.engine.running)


async def test_closed_stream_ends_its_sample(tmp_path: Path) -> None:
    async with foreign(tmp_path, FakeEngine(instant=False)) as served:
        for path in PATHS:
            body = {**BODIES[path], "stream": True}
            async with served.http.stream("POST", path, json=body) as answer:
                await until(lambda: served.engine.running)
                served.engine.step(1)
                await anext(live_events(answer))
            await until(lambda: not served.engine.running)


@EACH
async def test_tokens_are_streamed_as_they_are_sampled(tmp_path: Path, path: str) -> None:
    async with foreign(tmp_path, FakeEngine(instant=False)) as served:
        body = {**BODIES[path], "stream": True}
        async with served.http.stream("POST", path, json=body) as answer, asyncio.timeout(30):
            await until(lambda: served.engine.running)
            events = live_events(answer)
            for token in (3, 4):
                served.engine.step(1)
                await anext(event async for event in events if has_token(event, token))
            served.engine.step(2)
            assert [event async for event in events]


@EACH
async def test_death_of_the_engine_ends_a_stream_with_an_error(tmp_path: Path, path: str) -> None:
    """vLLM's Responses API has no event for it: the connection breaks off."""
    async with foreign(tmp_path, FakeEngine(instant=False)) as served:
        body = {**BODIES[path], "stream": True}
        async with served.http.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200
            await until(lambda: served.engine.running)
            served.engine.step(1)
            served.engine.die()
            if path == RESPONSES:
                with pytest.raises(httpx.RemoteProtocolError):
                    await answer.aread()
                return
            last = events_of((await answer.aread()).decode())[-1]
    assert last["error"]["message"]


@EACH
async def test_death_of_the_engine_is_an_error(tmp_path: Path, path: str) -> None:
    async with foreign(tmp_path, FakeEngine(instant=False)) as served:
        request = asyncio.create_task(served.http.post(path, json=BODIES[path]))
        await until(lambda: served.engine.running)
        served.engine.step(1)
        served.engine.die()
        answer = await request
    status = 529 if path == MESSAGES else 503
    assert (answer.status_code, code_of(answer)) == (status, "engine_dead")


@EACH
async def test_silent_stream_is_kept_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Also after tokens without an event, such as those of an incomplete stop string."""
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_SECONDS", 0.02)
    kept = "event: ping" if path == MESSAGES else ": samples are still being generated"
    async with foreign(tmp_path, FakeEngine(instant=False)) as served, asyncio.timeout(30):
        body = {**BODIES[path], "stream": True}
        async with served.http.stream("POST", path, json=body) as answer:
            received, num_steps = "", 0
            async for text in answer.aiter_text():
                received += text
                if received.count(kept) > 2:
                    served.engine.step(1)
                    received, num_steps = "", num_steps + 1
    assert num_steps > 1


@EACH
async def test_invalid_bodies_are_refused_in_the_format_of_the_api(
    tmp_path: Path, path: str
) -> None:
    large = {**BODIES[path], "user": "x" * 2000}
    async with foreign(tmp_path, limits={"max_body_bytes": 1024}) as served:
        for content, headers, status in (
            (json.dumps(large), JSON, 413),
            (json.dumps(BODIES[path]), {"content-type": "text/plain"}, 415),
            ("[1]", JSON, 400),
            ("{", JSON, 400),
        ):
            answer = await served.http.post(path, content=content, headers=headers)
            assert answer.status_code == status, answer.text
            kind = "application/json" if path == MESSAGES else PROBLEM
            assert answer.headers["content-type"] == kind
            assert message_of(answer)
        for body in ({}, {**BODIES[path], "stream": "sometimes"}):
            answer = await served.http.post(path, json=body)
            assert (answer.status_code, answer.headers["content-type"]) == (
                400,
                JSON["content-type"],
            )
            assert message_of(answer)
        assert served.engine.submitted == []


HOSTILE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [0] * NUM_WRONG},
    COMPLETIONS: {"prompt": [[""] * NUM_WRONG]},
    RESPONSES: {"input": [0] * NUM_WRONG},
    MESSAGES: {"model": "fake", "max_tokens": 1, "messages": [0] * NUM_WRONG},
    GENERATE: {"token_ids": [""] * NUM_WRONG, "sampling_params": {}},
    "/tokenize": {"prompt": [0] * (NUM_WRONG // 2)},
    "/detokenize": {"tokens": [""] * (NUM_WRONG // 3)},
}


@pytest.mark.parametrize("path", HOSTILE)
async def test_wrong_values_do_not_block_the_event_loop(tmp_path: Path, path: str) -> None:
    """pydantic makes an error of each value, or of none."""
    content = json.dumps(HOSTILE[path], separators=(",", ":"))
    async with foreign(tmp_path) as served:
        gaps, last = [0.0], time.monotonic()

        async def tick() -> None:
            nonlocal last
            while True:
                await asyncio.sleep(0.001)
                now = time.monotonic()
                gaps.append(now - last)
                last = now

        ticking = asyncio.create_task(tick())
        start = time.monotonic()
        answer = await served.http.post(path, content=content, headers=JSON)
        seconds = time.monotonic() - start
        ticking.cancel()
        assert answer.status_code == 400, answer.text[:500]
        assert len(answer.text) < 10_000
    assert (seconds < 10, max(gaps) < 1.0) == (True, True), (seconds, max(gaps))


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def tool(path: str, schema: dict[str, Any]) -> dict[str, Any]:
    if path == MESSAGES:
        return {"name": "f", "input_schema": schema}
    function = {"name": "f", "parameters": schema}
    if path == RESPONSES:
        return {"type": "function", **function}
    return {"type": "function", "function": function}


@pytest.mark.parametrize(
    "build",
    [
        lambda path: '{"messages":' + "[" * 100_000,
        lambda path: '{"input":' + "[" * 10_000 + "]" * 10_000 + "}",
        lambda path: json.dumps({**BODIES[path], "tools": [tool(path, deep(90))]}),
        lambda path: json.dumps({**BODIES[path], "tools": [tool(path, {})] * 2000}),
        lambda path: json.dumps({**BODIES[path], "metadata": {"a": deep(90)}}),
        lambda path: json.dumps(sampled(path, structured_outputs={"json": deep(90)})),
        lambda path: json.dumps({**BODIES[path], "chat_template_kwargs": {"a": deep(90)}}),
    ],
)
@EACH
async def test_deep_and_long_bodies_do_not_fail_the_server(
    tmp_path: Path, path: str, build: Callable[[str], str]
) -> None:
    async with foreign(tmp_path) as served:
        answer = await served.http.post(path, content=build(path), headers=JSON)
        assert answer.status_code in (200, 400), answer.text
        await served.post(path, BODIES[path])


@EACH
async def test_headers_of_other_apis_are_accepted(tmp_path: Path, path: str) -> None:
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "fine-grained-tool-streaming-2025-05-14",
        "openai-beta": "responses=v1",
    }
    async with foreign(tmp_path) as served:
        await served.post(path, BODIES[path], headers=headers)


async def test_slow_client_receives_longer_parts(tmp_path: Path) -> None:
    """Its request holds no queue of parts."""
    async with foreign(tmp_path, FakeEngine(instant=False)) as served:
        body = {**BODIES[COMPLETIONS], "max_tokens": 400, "stream": True}
        async with served.http.stream("POST", COMPLETIONS, json=body) as answer:
            await until(lambda: served.engine.running)
            for _ in range(300):
                served.engine.step(1)
            served.engine.step(100)
            parts = [len(event["choices"][0]["text"]) async for event in live_events(answer)]
    assert sum(parts) == 400 and len(parts) < 8


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_template_of_a_request_is_refused(tmp_path: Path, path: str) -> None:
    """A template is a program."""
    async with foreign(tmp_path) as served:
        for fields in (
            {"chat_template": "{{ 1 }}"},
            {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        ):
            answer = await served.http.post(path, json={"messages": ASKED, **fields})
            assert answer.status_code == 400
            assert "chat template" in message_of(answer).replace("_", " ").lower()

"""Hostile images, and options that exclude images: refused with 400 before anything is fetched."""

import asyncio
import struct
import time
import zlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from engine.vllm_engine import VllmEngine
from tests.engine.seedling import MODEL, settings
from tests.engine.vision_model import (
    bytes_url,
    data_url,
    encoded,
    image_part,
    noise,
    save_vision_model,
)
from tests.serving import Served, serving

# Imports of vLLM emit unrelated warnings.
pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.asyncio(loop_scope="module"),
]

GOOD = data_url(noise(1))
SAMPLING = {"temperature": 0, "max_tokens": 2, "ignore_eos": True}


def blank_png(side: int) -> bytes:
    """A PNG of one color, whose file is a thousandth of its pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)

    packer = zlib.compressobj(9)
    row = bytes(1 + side // 8 + 1)
    rows = b"".join([*(packer.compress(row) for _ in range(side)), packer.flush()])
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    )


V0 = {"version": "v0", "start": 0, "end": 1}
HOSTILE = (
    *("file", "relative", "ftp", "upper case", "not base64", "not encoded", "without a comma"),
    *("empty", "text", "truncated", "only a header", "animation"),
    *("bomb", "smaller bomb"),
)


def hostile_urls() -> dict[str, str]:
    png = encoded(noise(3))
    frames = [noise(seed) for seed in (1, 2)]
    animation = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    return {
        "file": "file:///etc/passwd",
        "relative": "/etc/passwd",
        "ftp": "ftp://127.0.0.1/image.png",
        "upper case": "FILE:///etc/passwd",
        "not base64": "data:image/png;base64,!!!!",
        "not encoded": "data:image/png,abc",
        "without a comma": "data:image/png;base64",
        "empty": "data:image/png;base64,",
        "text": bytes_url(b"no image"),
        "truncated": bytes_url(png[: len(png) // 2]),
        "only a header": bytes_url(png[:33]),
        "animation": bytes_url(animation, "image/gif"),
        "bomb": bytes_url(blank_png(30_000)),
        "smaller bomb": bytes_url(blank_png(12_000)),
    }


@pytest.fixture(scope="module")
def hostile() -> dict[str, str]:
    return hostile_urls()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    root = tmp_path_factory.mktemp("vision")
    limits = {"limit_mm_per_prompt": {"image": 3}}
    model = save_vision_model(root / "model")
    engine = VllmEngine(settings(model, vllm_args=limits))
    async with (
        serving(engine, root / "server") as found,
        httpx.AsyncClient(base_url=found.url, timeout=60) as http,  # vLLM's routes have no contract
    ):
        yield replace(found, http=http)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def listener() -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server of the cluster, and what it has received."""
    received = list[bytes]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.read(64))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        yield f"http://127.0.0.1:{port}/image.png", received


def chat(*urls: str, **options: Any) -> dict[str, Any]:
    content = [*map(image_part, urls), {"type": "text", "text": "1+2"}]
    return {"messages": [{"role": "user", "content": content}], **SAMPLING, **options}


def rollout(*urls: str, n: int = 1, **options: Any) -> dict[str, Any]:
    content = [*map(image_part, urls), {"type": "text", "text": "1+2"}]
    prompt = {"messages": [{"role": "user", "content": content}], **options.pop("prompt", {})}
    return {"groups": [{"prompt": prompt, "n": n}], "sampling": SAMPLING, **options}


def every_api(url: str) -> list[tuple[str, dict[str, Any]]]:
    """A request with the image for each route that takes images."""
    item = {"type": "input_image", "image_url": url, "detail": "auto"}
    source = {"type": "url", "url": url}
    user: Any = {"role": "user", "content": [{"type": "image", "source": source}]}
    return [
        ("/v1/chat/completions", chat(url)),
        ("/v1/chat/completions", chat(url, stream=True)),
        ("/v1/responses", {"input": [{"role": "user", "content": [item]}]}),
        ("/v1/messages", {"model": "m", "max_tokens": 2, "messages": [user]}),
        ("/tokenize", {"messages": chat(url)["messages"]}),
        (
            "/inference/v1/generate",
            {
                "token_ids": [3, 269],
                "sampling_params": {"max_tokens": 2},
                "content_parts": [image_part(url)],
            },
        ),
        ("/v1/rollouts", rollout(url)),
        (
            "/v1/score",
            {"items": [{"prompt": rollout(url)["groups"][0]["prompt"], "responses": [[3]]}]},
        ),
    ]


async def assert_serves(served: Served) -> None:
    response = await served.http.post("/v1/chat/completions", json=chat(GOOD))
    assert response.status_code == 200, response.text
    assert served.server.rollouts.num_running == 0


async def test_no_address_is_fetched(served: Served, listener: tuple[str, list[bytes]]) -> None:
    url, received = listener
    for path, body in every_api(url):
        if path == "/v1/messages":
            body["model"] = served.server.engine.info.model
        response = await served.http.post(path, json=body)
        assert response.status_code in (400, 422), (path, response.text)
    assert not received
    await assert_serves(served)


async def test_other_media_are_not_fetched(
    served: Served, listener: tuple[str, list[bytes]]
) -> None:
    url, received = listener
    for kind in ("audio_url", "video_url"):
        body = chat()
        body["messages"][0]["content"].append({"type": kind, kind: {"url": url}})
        response = await served.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 400, response.text
    assert not received


@pytest.mark.parametrize(
    "name",
    HOSTILE,
)
async def test_hostile_images_are_refused_quickly(
    served: Served, hostile: dict[str, str], name: str
) -> None:
    longest = 0.0

    async def watch() -> None:
        """Measure the longest pause of the event loop."""
        nonlocal longest
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.001)
            longest = max(longest, time.monotonic() - before)

    watcher = asyncio.create_task(watch())
    try:
        for path, body in (
            ("/v1/chat/completions", chat(hostile[name])),
            ("/v1/rollouts", rollout(hostile[name])),
        ):
            response = await served.http.post(path, json=body)
            assert response.status_code in (400, 422), (path, response.text)
    finally:
        watcher.cancel()
    assert longest < 2.0, "decoding would take many seconds"
    await assert_serves(served)


async def test_many_images_are_refused_before_they_are_decoded(served: Served) -> None:
    response = await served.http.post("/v1/chat/completions", json=chat(*[GOOD] * 4))
    assert response.status_code == 400
    assert "image" in response.json()["error"]["message"]
    response = await served.http.post("/v1/rollouts", json=rollout(*[GOOD] * 4))
    assert response.status_code == 422, response.text


async def test_pixels_of_a_request_are_limited_together(served: Served) -> None:
    large = bytes_url(blank_png(5_000))
    one = await served.http.post("/v1/chat/completions", json=chat(large, large))
    assert one.status_code == 200, one.text
    response = await served.http.post("/v1/chat/completions", json=chat(large, large, large))
    assert response.status_code == 400
    assert "pixels" in response.json()["error"]["message"]


async def test_names_of_images_are_refused(served: Served) -> None:
    body = chat(GOOD)
    body["messages"][0]["content"][0]["uuid"] = "another caller's"
    response = await served.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "uuid" in response.text


@pytest.mark.parametrize("name", ["mm_processor_kwargs", "media_io_kwargs"])
async def test_options_of_the_image_processor_are_refused(served: Served, name: str) -> None:
    options: Any = {"image": {"a": 1}} if name == "media_io_kwargs" else {"size": 1}
    response = await served.http.post("/v1/chat/completions", json=chat(GOOD, **{name: options}))
    assert response.status_code == 400
    assert name in response.text


@pytest.mark.parametrize(
    "options",
    [
        {"kv": {}},
        {"keep_kv": {}},
        {"branching": {"mode": "entropy"}},
        {"continue_from": {"samples": [{"token_ids": [3], "logprobs": [-1.0], "versions": [V0]}]}},
        {"prompt_logprobs": 0},
        {"prompt": {"truncate_prompt_tokens": 8}},
    ],
    ids=lambda options: next(iter(options)),
)
async def test_options_without_images_are_refused(served: Served, options: dict[str, Any]) -> None:
    response = await served.http.post("/v1/rollouts", json=rollout(GOOD, **options))
    assert response.status_code == 422, response.text
    assert "images" in response.text, response.text


async def test_prompt_logprobs_of_a_chat_with_images_are_refused(served: Served) -> None:
    response = await served.http.post("/v1/chat/completions", json=chat(GOOD, prompt_logprobs=0))
    assert response.status_code == 400
    assert "images" in response.text
    await assert_serves(served)


async def test_scores_and_sessions_refuse_images(served: Served) -> None:
    prompt = rollout(GOOD)["groups"][0]["prompt"]
    scored = await served.http.post(
        "/v1/score", json={"items": [{"prompt": prompt, "responses": [[3]]}]}
    )
    assert scored.status_code == 422, scored.text
    assert "images" in scored.text
    [session] = (await served.http.post("/v1/sessions", json={})).json()["sessions"]
    path, key = f"{session['path']}/v1/chat/completions", session["key"]
    called = await served.http.post(
        path, json=chat(GOOD), headers={"Authorization": f"Bearer {key}"}
    )
    assert called.status_code == 400, called.text
    assert "images" in called.text


async def test_text_models_refuse_images(tmp_path: Path) -> None:
    async with (
        serving(VllmEngine(settings(MODEL)), tmp_path) as served,
        httpx.AsyncClient(base_url=served.url, timeout=60) as http,
    ):
        for path, body in every_api(GOOD):
            if path in ("/inference/v1/generate", "/v1/messages"):
                continue
            response = await http.post(path, json=body)
            assert response.status_code in (400, 422), (path, response.text)

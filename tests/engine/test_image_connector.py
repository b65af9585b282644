"""Loading of images by URL: hosts that the operator allows, redirects, and turns of requests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from vllm.exceptions import VLLMError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY

from engine.requests import images
from engine.requests.images import MAX_PIXELS, MIN_PIXELS, ImageBudget, ImageConnector
from tests.engine.vision_model import data_url, encoded, noise

# Imports of vLLM emit unrelated warnings.
pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.asyncio(loop_scope="module"),  # of the connection that all share
]
PNG = encoded(noise(1))


@asynccontextmanager
async def http_server(response: bytes) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Port of a server that answers everything in the same way, and its requests."""
    requests = list[bytes]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"\r\n"))
        writer.write(response)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], requests


def found(content: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content)


def connector(*domains: str) -> ImageConnector:
    made = MEDIA_CONNECTOR_REGISTRY.load("http", allowed_media_domains=list(domains))
    assert isinstance(made, ImageConnector)
    return made


async def test_an_allowed_host_is_fetched() -> None:
    async with http_server(found(PNG)) as (port, requests):
        url = f"http://127.0.0.1:{port}/a.png"
        image = await connector("127.0.0.1").fetch_image_async(url)
        assert image.media.size == noise(1).size
        assert len(requests) == 1
        with pytest.raises(VLLMError):
            await connector("example.org").fetch_image_async(url)
        assert len(requests) == 1


async def test_a_redirect_is_not_followed() -> None:
    async with http_server(found(PNG)) as (port, requests):
        moved = f"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:{port}/\r\n"
        async with http_server(f"{moved}Content-Length: 0\r\n\r\n".encode()) as (first, _):
            with pytest.raises(VLLMError):
                url = f"http://127.0.0.1:{first}/a.png"
                await connector("127.0.0.1").fetch_image_async(url)
        assert not requests


async def test_an_image_of_an_allowed_host_is_limited() -> None:
    with images.within(ImageBudget()) as budget:
        budget.add(MAX_PIXELS - MIN_PIXELS + 1)
        async with http_server(found(PNG)) as (port, _):
            with pytest.raises(VLLMError, match="pixels"):
                url = f"http://127.0.0.1:{port}/a.png"
                await connector("127.0.0.1").fetch_image_async(url)


async def test_requests_decode_their_images_in_turns() -> None:
    """A request keeps its turn until its prompt is rendered; one without images needs none."""
    turns, url = asyncio.Semaphore(1), data_url(noise(1))

    async def load(budget: ImageBudget) -> None:
        with images.within(budget):
            await asyncio.gather(*(connector().fetch_image_async(url) for _ in range(3)))
            await asyncio.sleep(0.01)
            assert turns.locked()

    await asyncio.gather(*(load(ImageBudget(turns)) for _ in range(4)))
    assert not turns.locked()
    with images.within(ImageBudget(turns)):
        assert not turns.locked()


async def test_a_cancelled_request_returns_its_turn() -> None:
    turns, url = asyncio.Semaphore(1), data_url(noise(1))

    async def load() -> None:
        with images.within(ImageBudget(turns)):
            await connector().fetch_image_async(url)
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(load()) for _ in range(3)]
    await asyncio.sleep(0.05)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)
    assert not turns.locked()

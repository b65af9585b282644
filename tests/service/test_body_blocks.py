"""Large request bodies, which are received in blocks and not by uvicorn's parser."""

import asyncio
import hashlib
import json
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from service.config.settings import LimitsSettings
from service.http import body_blocks
from service.http.body_blocks import ALIGNMENT, MAX_BLOCK_BYTES, MIN_BLOCK_BYTES, MIN_REST_BYTES
from service.http.uvicorn_protocol import protocol_with_limits
from tests.serving import PromptListener

BODY = np.random.default_rng(0).bytes(5 * MAX_BLOCK_BYTES + 12_345)
SMALL = b"GET /small HTTP/1.1\r\nHost: localhost\r\n\r\n"


@dataclass
class Reader:
    """ASGI app that answers with the digest of the body; `limit` ends the reading earlier."""

    limit: int | None = None
    sizes: list[int] = field(default_factory=list)
    disconnected: asyncio.Event = field(default_factory=asyncio.Event)
    wait: asyncio.Event | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        digest, received, has_more = hashlib.sha256(), 0, True
        while has_more and (self.limit is None or received < self.limit):
            message = await receive()
            if message["type"] == "http.disconnect":
                self.disconnected.set()
                return
            digest.update(message["body"])
            self.sizes.append(len(message["body"]))
            received, has_more = received + self.sizes[-1], message["more_body"]
            if self.wait is not None:
                await self.wait.wait()
        content = json.dumps([scope["path"], received, digest.hexdigest()]).encode()
        head = {"type": "http.response.start", "status": 200}
        await send({**head, "headers": [(b"content-length", b"%d" % len(content))]})
        await send({"type": "http.response.body", "body": content})

    async def received(self, num_bytes: int) -> None:
        """Wait until the app has received so many bytes."""
        while sum(self.sizes) < num_bytes:
            await asyncio.sleep(0.001)


@dataclass
class Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, *parts: bytes) -> None:
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()

    async def answer(self) -> Any:
        head = await self.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = next(int(line[15:]) for line in head.split(b"\r\n") if b"content-length" in line)
        return json.loads(await self.reader.readexactly(length))


@asynccontextmanager
async def connected(
    app: Reader, keep_alive_seconds: int = 5, **limits: Any
) -> AsyncIterator[Connection]:
    """A connection to a server of this app."""
    http = protocol_with_limits(LimitsSettings(**limits))
    config = uvicorn.Config(app, http=http, port=0, log_level="warning", lifespan="off", ws="none")
    config.timeout_keep_alive = keep_alive_seconds
    listener = PromptListener(config)
    task = asyncio.create_task(listener.serve())
    while not listener.started:
        await asyncio.sleep(0.001)
    try:
        port = listener.servers[0].sockets[0].getsockname()[1]
        connection = Connection(*await asyncio.open_connection("127.0.0.1", port))
        async with asyncio.timeout(30):
            yield connection
    finally:
        connection.writer.transport.abort()
        listener.leave.set()
        await task


@contextmanager
def memory_trace() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def num_block_bytes() -> int:
    """Memory of the blocks that were allocated since the start of the trace."""
    module = [tracemalloc.Filter(True, body_blocks.__file__)]
    traces = tracemalloc.take_snapshot().filter_traces(module).traces
    return sum(trace.size for trace in traces if trace.size >= MIN_BLOCK_BYTES // 2)


def head(content: bytes = BODY, extra: bytes = b"") -> bytes:
    length = b"Content-Length: %d\r\n" % len(content)
    return b"PUT /large HTTP/1.1\r\nHost: localhost\r\n" + length + extra + b"\r\n"


def answer_of(content: bytes = BODY) -> list[object]:
    return ["/large", len(content), hashlib.sha256(content).hexdigest()]


async def test_large_body_arrives_in_few_aligned_blocks() -> None:
    app = Reader()
    async with connected(app) as connection:
        await connection.send(head(), BODY)
        assert await connection.answer() == answer_of()
    offsets = np.cumsum(app.sizes)[1:-1]
    assert max(app.sizes) <= MAX_BLOCK_BYTES
    assert all(offset % ALIGNMENT == 0 for offset in offsets if offset > 2 * MIN_REST_BYTES)


@pytest.mark.parametrize("seed", range(4))
async def test_parts_of_any_size_are_joined(seed: int) -> None:
    draw = np.random.default_rng(seed)
    cuts = sorted(draw.integers(0, len(BODY), size=12).tolist())
    parts = [BODY[start:end] for start, end in zip([0, *cuts], [*cuts, len(BODY)], strict=True)]
    async with connected(Reader()) as connection:
        await connection.send(head())
        for part in parts:
            await connection.send(part)
            await asyncio.sleep(0.005)
        assert await connection.answer() == answer_of()


async def test_requests_after_a_large_body_are_answered() -> None:
    empty = ["/small", 0, hashlib.sha256().hexdigest()]
    async with connected(Reader()) as connection:
        await connection.send(head() + BODY + SMALL + head() + BODY + SMALL)
        answers = [await connection.answer() for _ in range(4)]
        assert answers == [answer_of(), empty, answer_of(), empty]


async def test_rest_of_a_body_that_is_not_read_is_dropped() -> None:
    async with connected(Reader(limit=MAX_BLOCK_BYTES)) as connection:
        sending = asyncio.create_task(connection.send(head(), BODY, SMALL))
        path, received, _ = await connection.answer()
        assert path == "/large" and MAX_BLOCK_BYTES <= received < len(BODY)
        assert (await connection.answer())[0] == "/small"
        await sending


async def test_rest_of_a_body_that_does_not_arrive_has_a_timeout() -> None:
    async with connected(Reader(limit=1), read_seconds=0.2) as connection:
        await connection.send(head(), BODY[: 2 * MAX_BLOCK_BYTES])
        await connection.answer()
        assert await connection.reader.read() == b""


async def test_rest_of_a_body_may_take_longer_than_the_keep_alive_timeout() -> None:
    async with connected(Reader(limit=1), keep_alive_seconds=1) as connection:
        await connection.send(head(), BODY[:MAX_BLOCK_BYTES])
        assert (await connection.answer())[0] == "/large"
        cuts = range(MAX_BLOCK_BYTES, len(BODY), MAX_BLOCK_BYTES // 2)
        for start in cuts:
            await asyncio.sleep(1.6 / len(cuts))
            await connection.send(BODY[start : start + cuts.step])
        await connection.send(SMALL)
        assert (await connection.answer())[0] == "/small"


async def test_continue_is_sent_before_a_large_body() -> None:
    async with connected(Reader()) as connection:
        await connection.send(head(extra=b"Expect: 100-continue\r\n"))
        assert await connection.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await connection.send(BODY)
        assert await connection.answer() == answer_of()


async def test_part_of_a_block_is_received_when_nothing_follows() -> None:
    app = Reader()
    async with connected(app) as connection:
        await connection.send(head(), BODY[: MIN_REST_BYTES + 1000])
        await app.received(MIN_REST_BYTES + 1000)
        await connection.send(BODY[MIN_REST_BYTES + 1000 :])
        assert await connection.answer() == answer_of()


async def test_disconnect_within_a_large_body_reaches_the_app() -> None:
    app = Reader()
    async with connected(app) as connection:
        await connection.send(head(), BODY[: 2 * MAX_BLOCK_BYTES])
        connection.writer.transport.abort()
        await app.disconnected.wait()


async def test_disconnect_is_detected_while_the_app_takes_no_block() -> None:
    app = Reader(wait=asyncio.Event())
    assert app.wait is not None
    async with connected(app) as connection:
        sending = asyncio.create_task(connection.send(head(), BODY))
        while not app.sizes:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        connection.writer.transport.abort()
        await asyncio.gather(sending, return_exceptions=True)
        await asyncio.sleep(0.5)
        app.wait.set()
        await app.disconnected.wait()


async def test_client_that_sends_one_byte_occupies_no_block() -> None:
    app = Reader()
    with memory_trace():
        async with connected(app) as connection:
            await connection.send(head(), BODY[:1])
            await app.received(1)
            assert num_block_bytes() == 0


async def test_client_that_becomes_slow_occupies_a_small_block() -> None:
    app = Reader()
    num_sent = 3 * MAX_BLOCK_BYTES
    async with connected(app) as connection:
        await connection.send(head(), BODY[:num_sent])
        await app.received(num_sent)
        with memory_trace():
            for _ in range(8):
                num_sent = await send_byte(connection, num_sent)
                await app.received(num_sent)
            app.wait = asyncio.Event()  # the app takes the next byte, but not the one after it
            num_sent = await send_byte(connection, num_sent)
            await app.received(num_sent)
            num_sent = await send_byte(connection, num_sent)
            while not num_block_bytes():
                await asyncio.sleep(0.001)
            occupied = num_block_bytes()
            app.wait.set()
        assert occupied <= MIN_BLOCK_BYTES
        await connection.send(BODY[num_sent:])
        assert await connection.answer() == answer_of()


async def send_byte(connection: Connection, position: int) -> int:
    """Send the byte of the body at this position; returns the next one."""
    await connection.send(BODY[position : position + 1])
    return position + 1

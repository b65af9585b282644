"""HTTP framing: trailers, chunk extensions, upgrade requests, and pipelined requests."""

import asyncio
import json
import re
import resource
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
from starlette.responses import StreamingResponse

from service.auth.access import public
from tests.fake_engine import FakeEngine
from tests.service.keyfile import write_keys
from tests.service.sockets import Raw, raw
from tests.service.test_http_limits import HEAD, SOON, alive
from tests.service.test_rollouts import body, group, running_samples
from tests.serving import serving

pytestmark = pytest.mark.slow

CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n"
CLOSE = b"Connection: close\r\n"
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
GET = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
NOT_BUFFERED = 2**24
"""Bytes of a body that sockets do not buffer: the server has read a part when it is sent."""


def rollout() -> bytes:
    return json.dumps(body(group(1))).encode()


def sized(extra: bytes = b"", content: bytes | None = None) -> bytes:
    content = rollout() if content is None else content
    return HEAD + extra + b"Content-Length: %d\r\n\r\n" % len(content) + content


def chunked(extra: bytes = b"", trailer: bytes = b"") -> bytes:
    content = rollout()
    chunk = b"%x\r\n" % len(content) + content + b"\r\n"
    return CHUNKED + extra + b"\r\n" + chunk + b"0\r\n" + trailer + b"\r\n"


async def code(client: Raw) -> tuple[int, str]:
    status, content = await client.answer()
    return status, json.loads(content)["code"]


async def held_bytes(client: Raw, before: bytes, piece: bytes, *, pieces: int) -> int:
    """Growth of this process in bytes until the server closes or all pieces are sent."""
    known = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    await client.send(before)
    try:
        for _ in range(pieces):
            await client.send(piece)
    except ConnectionError:
        pass
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - known) * 1024


# HTTP/1.0


async def test_stream_to_an_http_1_0_client_has_no_chunks(tmp_path: Path) -> None:
    content = rollout()
    request = (
        b"POST /v1/rollouts HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Accept: application/x-ndjson\r\nContent-Length: %d\r\n\r\n" % len(content)
    )
    async with serving(FakeEngine(), tmp_path) as served, raw(served) as client:
        await client.send(request + content)
        head, _, streamed = (await client.rest()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert json.loads(streamed.splitlines()[-1])["type"] == "end"


# Trailers and chunk extensions


async def test_key_in_a_trailer_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    secret = write_keys(file, a="rollout")["a"].encode()
    trailer = b"Authorization: Bearer " + secret + b"\r\n"
    async with serving(FakeEngine(), tmp_path, server={"keys_file": file}) as served:
        for where in ({"extra": CLOSE + trailer}, {"extra": CLOSE, "trailer": trailer}):
            async with raw(served) as client:
                await client.send(chunked(**where))
                status, _ = await client.answer()
                assert status == (401 if "trailer" in where else 200)


async def test_trailer_fields_are_ignored(tmp_path: Path) -> None:
    trailer = b"Content-Type: text/plain\r\nX-Checksum: 1\r\n"
    async with serving(FakeEngine(), tmp_path) as served, raw(served) as client:
        await client.send(chunked(CLOSE, trailer))
        assert (await client.answer())[0] == 200


@pytest.mark.parametrize("name", [b"Content-Length: 5", b"Transfer-Encoding: chunked"])
async def test_framing_field_in_a_trailer_is_refused(tmp_path: Path, name: bytes) -> None:
    async with serving(FakeEngine(), tmp_path) as served, raw(served) as client:
        await client.send(chunked(b"", name + b"\r\n"))
        assert await code(client) == (400, "malformed_request")


ENDLESS = {
    "trailer_value": (b"0\r\nX-A: ", b"a" * 2**16),
    "trailer_name": (b"0\r\n", b"a" * 2**16),
    "trailer_fields": (b"0\r\n", b"X-A: b\r\n" * 2**13),
    "extension": (b"1;x=", b"a" * 2**16),
    "extensions": (b"", (b"1;x=" + b"a" * 2**10 + b"\r\na\r\n") * 64),
    "size": (b"", b"0" * 2**16),
}


@pytest.mark.parametrize("keyless", [True, False])
@pytest.mark.parametrize("shape", ENDLESS)
async def test_unbounded_framing_is_refused(tmp_path: Path, shape: str, keyless: bool) -> None:
    before, piece = ENDLESS[shape]
    file = tmp_path / "keys.yaml"
    write_keys(file, a="rollout")
    server = {} if keyless else {"keys_file": file}
    async with serving(FakeEngine(), tmp_path, server=server) as served, raw(served) as client:
        grown = await held_bytes(client, CHUNKED + b"\r\n" + before, piece, pieces=1000)
        assert grown < 32 * 2**20
        began = time.monotonic()
        assert await alive(served)
        assert time.monotonic() - began < 2
        assert (await client.answer())[0] in ((431, 0) if keyless else (401, 431, 0))


async def test_slowly_sent_framing_has_the_deadline_of_a_body(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path, limits=SOON) as served, raw(served) as client:
        await client.send(CHUNKED + b"\r\n0\r\nX-A: ")
        answer = asyncio.create_task(client.answer())
        while not answer.done():
            client.writer.write(b"a")
            await asyncio.sleep(0.02)
        assert answer.result()[0] == 408


async def test_smallest_chunks_are_accepted(tmp_path: Path) -> None:
    content = rollout() + b" " * 40_000
    pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in content)
    async with serving(FakeEngine(), tmp_path) as served, raw(served) as client:
        await client.send(CHUNKED + CLOSE + b"\r\n")
        for start in range(0, len(pieces), 10_000):
            await client.send(pieces[start : start + 10_000])
        await client.send(b"0\r\n\r\n")
        assert (await client.answer())[0] == 200


# Upgrade


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"TLS/1.0"])
async def test_upgrade_request_keeps_its_body(tmp_path: Path, whole: bool, protocol: bytes) -> None:
    extra = UPGRADE.replace(b"h2c", protocol)
    async with serving(FakeEngine(), tmp_path) as served:
        for request in (sized(extra), chunked(extra)):
            async with raw(served) as client:
                for piece in [request] if whole else [b"%c" % byte for byte in request]:
                    await client.send(piece)
                await client.reader.readuntil(b"\r\n\r\n")
                await client.send(sized(CLOSE))
                rest = await client.rest()
                assert b"HTTP/1.1 200" in rest
                assert rest.count(b'"usage":') == 2


async def test_body_of_an_upgrade_request_is_not_parsed_as_a_request(tmp_path: Path) -> None:
    """Behind a proxy it would count as another caller's request."""
    smuggled = GET.replace(b"/livez", b"/smuggled")
    async with serving(FakeEngine(), tmp_path) as served, raw(served) as client:
        await client.send(sized(UPGRADE, smuggled) + sized(CLOSE))
        rest = await client.rest()
        assert rest.startswith(b"HTTP/1.1 400")
        assert b"invalid_json" in rest
        assert b"not_found" not in rest
        assert rest.count(b"HTTP/1.1 ") == 2


async def test_concurrent_upgrade_requests_are_answered(tmp_path: Path) -> None:
    request = GET.replace(b"\r\n\r\n", b"\r\n" + UPGRADE + b"\r\n")
    async with serving(FakeEngine(), tmp_path) as served, raw(served) as client:
        await client.send(request * 30 + GET.replace(b"\r\n\r\n", b"\r\n" + CLOSE + b"\r\n"))
        assert (await client.rest()).count(b"HTTP/1.1 200") == 31


# Pipelined requests


@pytest.mark.parametrize("behind", [GET, GET * 3, GET + b"GET /li", sized(content=b" " * 100_000)])
@pytest.mark.parametrize("together", [True, False])
async def test_disconnect_behind_a_pipelined_request_is_detected(
    tmp_path: Path, behind: bytes, together: bool
) -> None:
    async with serving(FakeEngine(instant=False), tmp_path) as served:
        async with raw(served) as client:
            if together:
                await client.send(sized() + behind)
                await running_samples(served, 1)
            else:
                await client.send(sized())
                await running_samples(served, 1)
                await client.send(behind)
            await asyncio.sleep(0.1)
        async with asyncio.timeout(2):
            await running_samples(served, 0)


async def test_answers_before_a_large_pipelined_body_are_complete(tmp_path: Path) -> None:
    """The last of them has Connection: close. The server reads on, to see a disconnect."""
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served, raw(served) as client:
        await client.send(sized() + GET)
        await running_samples(served, 1)
        await client.send(sized(content=b" " * NOT_BUFFERED) + GET)
        engine.step(4)
        first, last = (await client.rest()).split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert b"connection: close" not in first and first.endswith(b"}")
    assert b"connection: close" in last and last.endswith(b"}")


async def test_stream_before_a_large_pipelined_body_is_complete(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served, raw(served) as client:
        await client.send(sized(b"Accept: application/x-ndjson\r\n"))
        await client.reader.readuntil(b"\r\n\r\n")
        await client.send(sized(content=b" " * NOT_BUFFERED))
        engine.step(4)
        rest = await client.rest()
    assert b'"type":"end"' in rest and rest.endswith(b"\r\n0\r\n\r\n")


async def test_endless_pipelined_body_ends_the_connection(tmp_path: Path) -> None:
    limits = {"max_body_bytes": 2**20}
    async with serving(FakeEngine(instant=False), tmp_path, limits=limits) as served:
        async with raw(served) as client:
            await client.send(sized())
            await running_samples(served, 1)
            with suppress(ConnectionError):
                await client.send(sized(content=b" " * NOT_BUFFERED))
            assert await client.closed()
        await running_samples(served, 0)


async def test_large_request_is_served_after_a_response_that_is_whole(tmp_path: Path) -> None:
    """A client has the whole response before the app ends it, and is not pipelining."""
    has_gone_on = asyncio.Event()

    async def content() -> AsyncIterator[bytes]:
        yield b"whole"
        await has_gone_on.wait()

    async def slow_to_end() -> StreamingResponse:
        return StreamingResponse(content(), headers={"Content-Length": "5"})

    async with serving(FakeEngine(), tmp_path) as served, raw(served) as client:
        served.app.add_api_route("/slow", public(slow_to_end))
        await client.send(GET.replace(b"/livez", b"/slow"))
        await client.reader.readuntil(b"whole")
        await client.send(sized(CLOSE, rollout() + b" " * 100_000))
        await asyncio.sleep(0.1)
        has_gone_on.set()
        assert (await client.answer())[0] == 200


async def test_running_request_outlives_the_timeout_of_a_pipelined_head(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path, limits=SOON) as served, raw(served) as client:
        await client.send(sized() + GET + b"GET /livez HTTP/1.1\r\n")
        await running_samples(served, 1)
        await asyncio.sleep(0.6)
        engine.step(4)
        await client.send(b"Host: 127.0.0.1\r\n" + CLOSE + b"\r\n")
        assert (await client.rest()).count(b"HTTP/1.1 200") == 3


async def test_pipelined_requests_are_answered_in_order(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served, raw(served) as client:
        last = GET.replace(b"\r\n\r\n", b"\r\n" + CLOSE + b"\r\n")
        await client.send(GET + sized() + GET.replace(b"/livez", b"/nowhere") + last)
        rest = await client.rest()
        assert re.findall(rb"HTTP/1.1 (\d+)", rest) == [b"200", b"200", b"404", b"200"]


async def test_unbounded_pipelined_requests_are_not_queued(tmp_path: Path) -> None:
    async with serving(FakeEngine(instant=False), tmp_path) as served:
        async with raw(served) as client:
            await client.send(sized())
            await running_samples(served, 1)
            await client.send(GET * 5000)
            assert await client.closed()
        await running_samples(served, 0)
        assert await alive(served)


async def test_malformed_pipelined_request_does_not_corrupt_a_running_answer(
    tmp_path: Path,
) -> None:
    async with serving(FakeEngine(instant=False), tmp_path) as served:
        async with raw(served) as client:
            await client.send(sized())
            await running_samples(served, 1)
            await client.send(CHUNKED + b"\r\nzz\r\n")
            assert await client.closed()
        await running_samples(served, 0)


# Failures


async def broken() -> None:
    raise RuntimeError("nobody foresaw this")


@pytest.mark.parametrize("compat", [False, True])
async def test_unhandled_exception_answers_connection_close(tmp_path: Path, compat: bool) -> None:
    """Starlette raises it again after the answer, and uvicorn then closes the connection."""
    async with serving(FakeEngine(), tmp_path) as served, raw(served) as client:
        app = served.app.state.compat if compat else served.app
        app.add_api_route("/broken", public(broken))
        await client.send(GET.replace(b"/livez", b"/broken"))
        rest = await client.rest()
        assert rest.startswith(b"HTTP/1.1 500")
        assert b"\r\nconnection: close\r\n" in rest

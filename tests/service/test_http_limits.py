"""Slow, oversized and missing requests, and readers that stall, over real sockets."""

import asyncio
import json
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.config.limits import LimitsSettings
from service.http.limited_protocol import MAX_HEADER_BYTES
from service.routes.middleware import PIECE_BYTES, LimitsMiddleware
from tests.fake_engine import FakeEngine
from tests.service.keyfile import write_keys
from tests.service.sockets import parsed, raw
from tests.service.test_rollouts import body, group, running_samples
from tests.serving import Served, serving

pytestmark = pytest.mark.slow

HEAD = b"POST /v1/rollouts HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
GET = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
SOON = {"read_seconds": 0.2, "write_seconds": 0.2}
UNREAD = {"write_seconds": 0.2}
TOO_MANY = MAX_HEADER_BYTES + 1000


async def alive(served: Served) -> bool:
    return (await served.http.get("/readyz")).status_code == 200


# Heads


@pytest.mark.parametrize(
    "sent", [b"G", b"GET /livez HTTP/1.1\r\n", b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: b"]
)
async def test_incomplete_head_times_out(tmp_path: Path, sent: bytes) -> None:
    async with serving(FakeEngine(), tmp_path, limits=SOON) as served, raw(served) as client:
        await client.send(sent)
        status, content = await client.answer()
        assert (status, json.loads(content)["code"]) == (408, "request_timeout")


async def test_slowly_sent_head_has_the_same_deadline(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path, limits=SOON) as served, raw(served) as client:
        await client.send(b"GET /livez HTTP/1.1\r\n")
        answer = asyncio.create_task(client.answer())
        while not answer.done():
            with suppress(ConnectionError):  # closed already, with the answer in flight
                await client.send(b"X-A: b\r\n")
            await asyncio.sleep(0.02)
        assert answer.result()[0] == 408


@pytest.mark.parametrize("before", [b"", GET.replace(b"close", b"keep-alive")])
async def test_empty_line_does_not_keep_a_connection_open(tmp_path: Path, before: bytes) -> None:
    """The parser skips empty lines before a request."""
    limits = {"read_seconds": 1.0}
    async with serving(FakeEngine(), tmp_path, limits=limits) as served, raw(served) as client:
        if before:
            await client.send(before)
            await client.reader.readuntil(b'"serving"}')
        await client.send(b"\r\n")
        assert (await client.answer())[0] == 408


async def test_url_past_the_parser_s_limit_is_too_large(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served, raw(served) as client:
        await client.send(b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        status, content = await client.answer()
    assert (status, json.loads(content)["code"]) == (431, "headers_too_large")


async def test_silent_connection_is_closed(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path, limits=SOON) as served, raw(served) as client:
        assert await client.closed()


@pytest.mark.parametrize(
    "endless",
    [
        b"GET /" + b"a" * TOO_MANY,
        b"GET / HTTP/1.1\r\nX-A: " + b"a" * TOO_MANY,
        b"GET / HTTP/1.1\r\n" + b"X-A: b\r\n" * (TOO_MANY // 8),
        b"GET / HTTP/1.1\r\n" + b"X" * TOO_MANY,
    ],
)
@pytest.mark.parametrize("rest", [b"", b" HTTP/1.1\r\n\r\n"])
async def test_oversized_head_is_refused_while_it_arrives(
    tmp_path: Path, endless: bytes, rest: bytes
) -> None:
    async with serving(FakeEngine(), tmp_path) as served, raw(served) as client:
        await client.send(endless + rest)
        status, content = await client.answer()
        if rest and status == 400:
            assert json.loads(content)["detail"] == "the request could not be parsed as HTTP/1.1"
        else:
            assert (status, json.loads(content)["code"]) == (431, "headers_too_large")


async def test_head_of_many_parts_is_refused_before_its_end(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served, raw(served) as client:
        await client.send(b"GET / HTTP/1.1\r\n")
        answer = asyncio.create_task(client.answer())
        for _ in range(1000):
            if answer.done():
                break
            with suppress(ConnectionError):
                await client.send(b"X-A: b\r\n" * 64)
            await asyncio.sleep(0.001)
        assert (await answer)[0] == 431


async def test_complete_oversized_head_counts_as_a_request(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        answer = await served.http.get("/livez", headers={"x-a": "b" * MAX_HEADER_BYTES})
        assert (answer.status_code, answer.json()["code"]) == (431, "headers_too_large")
        assert answer.json()["request_id"] == answer.headers["x-request-id"]
        assert answer.headers["connection"] == "close"
        fits = await served.http.get("/livez", headers={"x-a": "b" * (MAX_HEADER_BYTES - 600)})
        assert fits.status_code == 200
        text = (await served.http.get("/metrics")).text
    assert 'coppice_requests_total{code="431",route="none"} 1.0' in text


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\n\r\n",
        b"CONNECT evil:443 HTTP/1.1\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n",
        b"POST /v1/rollouts HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/rollouts HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /v1/rollouts HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /v1/rollouts HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nA\x00B: c\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
    ],
)
async def test_malformed_http_gets_a_problem_and_affects_no_other_request(
    tmp_path: Path, sent: bytes
) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        async with raw(served) as client:
            await client.send(sent)
            status, content = await client.answer()
            assert 400 <= status < 500
            assert json.loads(content)["code"] in {"malformed_request", "not_found"}
        assert await alive(served)


async def test_invalid_bytes_after_a_running_request_end_the_connection(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served, raw(served) as client:
        content = json.dumps(body(group(1))).encode()
        await client.send(HEAD + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        await running_samples(served, 1)
        await client.send(b"\x00\x00")
        assert await client.closed()
        await running_samples(served, 0)


# Bodies


@pytest.mark.parametrize("came", [b"", b'{"groups": ['])
async def test_missing_body_times_out(tmp_path: Path, came: bytes) -> None:
    async with serving(FakeEngine(), tmp_path, limits=SOON) as served:
        async with raw(served) as client:
            await client.send(HEAD + b"Content-Length: 100\r\n\r\n" + came)
            status, content = await client.answer()
            assert (status, json.loads(content)["code"]) == (408, "request_timeout")
        assert await alive(served)


async def test_slowly_sent_body_times_out(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path, limits=SOON) as served, raw(served) as client:
        await client.send(HEAD + b"Content-Length: 100000\r\n\r\n")
        answer = asyncio.create_task(client.answer())
        while not answer.done():
            client.writer.write(b" ")
            await asyncio.sleep(0.02)
        assert answer.result()[0] == 408


async def test_steadily_sent_body_has_no_deadline(tmp_path: Path) -> None:
    async def content() -> Any:
        for _ in range(8):
            await asyncio.sleep(0.2)
            yield b" " * 20_000
        yield json.dumps(body(group(1))).encode()

    async with serving(FakeEngine(), tmp_path, limits={"read_seconds": 1.0}) as served:
        answer = await served.http.post("/v1/rollouts", content=content())
        assert answer.status_code == 200


async def test_interrupted_upload_leaves_nothing(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path, limits=SOON) as served:
        async with raw(served) as client:
            await client.send(
                b"PUT /v1/weights/v1 HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\nwei"
            )
            assert (await client.answer())[0] == 408
        assert not list((tmp_path / "weights").glob("*/.incoming-*"))
        known = (await served.http.get("/v1/weights")).json()
        assert [version["version"] for version in known["versions"]] == ["v0"]


async def test_rest_of_a_refused_body_is_not_awaited_forever(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path, limits=SOON) as served, raw(served) as client:
        head = b"POST /nowhere HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000\r\n\r\n"
        await client.send(head)
        await client.reader.readuntil(b"not_found")
        gone = asyncio.create_task(client.closed())
        while not gone.done():
            client.writer.write(b" ")
            await asyncio.sleep(0.02)


async def test_caller_waiting_for_a_long_answer_is_not_timed_out(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path, limits=SOON) as served:
        waiting = asyncio.create_task(served.http.post("/v1/rollouts", json=body(group(1))))
        await running_samples(served, 1)
        await asyncio.sleep(0.6)
        engine.step(4)
        assert (await waiting).status_code == 200


async def test_disconnect_within_a_body_is_no_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        async with raw(served) as client:
            await client.send(HEAD + b"Content-Length: 100\r\n\r\n{")
            await asyncio.sleep(0.05)
        line = 'coppice_requests_total{code="499",route="/v1/rollouts"} 1.0'
        while line not in (await served.http.get("/metrics")).text:
            await asyncio.sleep(0.01)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


# Readers


def narrow(served: Served) -> socket.socket:
    """A client with a minimal receive buffer."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    return client


async def ask_and_not_read(served: Served, client: socket.socket, asked: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    url = httpx.URL(served.url)
    await loop.sock_connect(client, (url.host, url.port))
    content = json.dumps(asked).encode()
    head = HEAD + b"Content-Length: %d\r\n\r\n" % len(content)
    await loop.sock_sendall(client, head + content)


LARGE = {"sampling": {"max_tokens": 30_000}}


async def test_unread_stream_is_dropped_and_its_rollout_ends(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False, max_context_tokens=2**21)
    async with serving(engine, tmp_path, limits=UNREAD) as served:
        with narrow(served) as client:
            groups = [group(1, n=64), group(2)]
            await ask_and_not_read(
                served, client, {"groups": groups, "stream": True, "sampling": {}}
            )
            await running_samples(served, 65)
            for sample in list(engine.running.values())[:64]:
                sample.token_versions = ["v0"] * 30_000
                engine._finish(sample, "stop")
            await running_samples(served, 0)
        assert await alive(served)


async def test_unread_plain_answer_is_dropped(tmp_path: Path) -> None:
    engine = FakeEngine(max_context_tokens=2**21)
    async with serving(engine, tmp_path, limits=UNREAD) as served:
        with narrow(served) as client:
            engine.instant = False
            asked = {"groups": [group(1, n=256)], "sampling": {"max_tokens": 10_000}}
            await ask_and_not_read(served, client, asked)
            await running_samples(served, 256)
            engine.step(10_000)
            while len(served.connections) > 1:
                await asyncio.sleep(0.01)
        assert await alive(served)


async def test_slow_but_steady_reader_gets_everything(tmp_path: Path) -> None:
    engine = FakeEngine(max_context_tokens=2**21)
    limits = {"write_seconds": 1.0}
    async with serving(engine, tmp_path, limits=limits) as served, raw(served) as client:
        engine.instant = False
        asked = {"groups": [group(1, n=256)], "sampling": {"max_tokens": 5_000}}
        content = json.dumps(asked).encode()
        head = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(content)
        await client.send(head + content)
        await running_samples(served, 256)
        engine.step(5_000)
        received = b""
        while chunk := await client.reader.read(2**18):
            received += chunk
            await asyncio.sleep(0.02)
        status, answer = parsed(received)
        assert (status, len(json.loads(answer)["groups"][0]["samples"])) == (200, 256)


async def test_large_answers_are_sent_in_parts_and_small_ones_whole() -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a" * 5, "more_body": True})
        await send({"type": "http.response.body", "body": b"b" * (2 * PIECE_BYTES + 1)})

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "headers": [], "raw_path": b"/", "query_string": b""}
    edges = LimitsMiddleware(app, limits=LimitsSettings())
    await edges(scope, None, send)  # type: ignore[arg-type]
    bodies = [(len(m["body"]), m["more_body"]) for m in sent[1:]]
    assert bodies == [(5, True), (PIECE_BYTES, True), (PIECE_BYTES, True), (1, False)]


# Host headers and paths


HOSTS = [
    b"evil.example",
    b"evil/?x",
    b"evil/livez?",
    b"evil/livez#",
    b'x"',
    b"x\\",
    b"[::",
    b"x:99999",
    b"",
    b"a" * 5000,
    b"\xff\xfe",
    b"localhost@evil/livez",
    b"livez/../",
]


@pytest.mark.parametrize("host", HOSTS)
async def test_untrusted_host_header_changes_no_access_and_no_answer(
    tmp_path: Path, host: bytes
) -> None:
    file = tmp_path / "keys.yaml"
    secret = write_keys(file, a="rollout")["a"].encode()
    requests = [
        b"GET /livez HTTP/1.1\r\n",
        b"GET /v1/status HTTP/1.1\r\n",
        b"GET //livez HTTP/1.1\r\n",
        b"GET /v1/status/../../livez HTTP/1.1\r\n",
        b"GET /v1/weights/ HTTP/1.1\r\n",
        b"GET http://evil/livez?/v1/status HTTP/1.1\r\n",
        b"POST /v1/pause HTTP/1.1\r\nContent-Length: 0\r\n",
        b"POST /v1/pause HTTP/1.1\r\nContent-Length: 0\r\nAuthorization: Bearer %b\r\n" % secret,
    ]
    async with serving(FakeEngine(), tmp_path, server={"keys_file": file}) as served:
        answers = [await _answers(served, requests, name) for name in (b"127.0.0.1", host)]
        assert answers[0] == answers[1]
        assert [status for status, _ in answers[0]] == [200, 401, 404, 404, 404, 200, 401, 403]
        assert not served.server.activation.pauses.paused


async def _answers(served: Served, requests: list[bytes], host: bytes) -> list[tuple[int, Any]]:
    answers = []
    for head in requests:
        async with raw(served) as client:
            await client.send(head + b"Host: " + host + b"\r\nConnection: close\r\n\r\n")
            status, content = await client.answer()
            answers.append((status, json.loads(content) | {"request_id": None}))
    return answers


async def test_path_with_a_double_slash_is_not_redirected(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        for path in ("/livez/", "/v1/rollouts/", "/v1/status/"):
            answer = await served.http.get(path, headers={"host": "evil.example"})
            assert answer.status_code == 404 if path != "/v1/rollouts/" else 405
            assert "location" not in answer.headers

"""Redirects between replicas: which ones a client follows with its key."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from coppice import KvSource, PromptKV, Redirected, Retry
from coppice.transport.redirects import RedirectPolicy
from tests.client.answers import ANSWER, LINES, VERSION
from tests.client.app import App, Body, answering, streaming
from tests.client.conftest import Connect
from tests.client.fake_clock import FakePace
from tests.client.test_kv import assert_right, fetched, handle_from, server

Answer = Callable[[httpx.Request], httpx.Response]
THERE = "http://coppice.test:9000"


def moved(to: str = THERE) -> Answer:
    """A redirect to the same path on another host."""
    return lambda request: httpx.Response(
        307, headers={"location": to + request.url.raw_path.decode()}
    )


def test_redirect_keeps_key_and_query(connect: Connect) -> None:
    app = App(moved(), answering(ANSWER))
    client = connect(app, api_key="s3cret")
    assert client.attach("a" * 12 + ".b").wait().id == "r1"
    first, second = app.requests
    assert str(second.url) == str(first.url).replace("http://coppice.test", THERE)
    assert second.headers["authorization"] == first.headers["authorization"] == "Bearer s3cret"


def test_redirected_stream_keeps_body_and_idempotency_key(connect: Connect) -> None:
    app = App(moved(), streaming(Body(LINES)))
    result = connect(app, retry=Retry()).rollout(["hello"])
    first, second = app.requests
    assert second.content == first.content
    assert second.headers["idempotency-key"] == first.headers["idempotency-key"]
    assert result.id == "r1"


def test_redirected_upload_is_sent_from_its_beginning(connect: Connect, tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    save_file({"w": np.zeros(1000, np.float32)}, file)
    app = App(moved(), answering(VERSION, 201))
    connect(app).upload_weights("v1", file)
    assert [request.content for request in app.requests] == [file.read_bytes()] * 2


def test_failure_after_a_redirect_retries_the_first_server(connect: Connect) -> None:
    body = Body(LINES[:3], httpx.ReadError(""))
    app = App(moved(), streaming(body), moved(), streaming(Body(LINES)))
    client = connect(app, retry=Retry(), clock=FakePace())
    assert client.rollout(["hello"]).id == "r1"
    assert [request.url.port for request in app.requests] == [None, 9000, None, 9000]


@pytest.mark.parametrize(
    "to",
    [
        "http://evil.test",
        "http://evil.test:80/coppice.test",
        "http://coppice.test.evil.test",
        "http://coppice.test@evil.test",
        "http://user:key@coppice.test",
        "https://coppice.test",
        "//coppice.test",
        "http://10.0.0.1",
    ],
)
def test_untrusted_host_or_scheme_is_not_followed(connect: Connect, to: str) -> None:
    app = App(moved(to))
    with pytest.raises(Redirected):
        connect(app, api_key="s3cret", retry=Retry(), clock=FakePace()).abort("r")
    assert app.request.url.host == "coppice.test"


def test_other_path_is_not_followed(connect: Connect) -> None:
    app = App(lambda request: httpx.Response(307, headers={"location": f"{THERE}/v1/pause"}))
    with pytest.raises(Redirected):
        connect(app).abort("r")
    assert len(app.requests) == 1


def test_redirect_without_a_location_is_a_bad_answer(connect: Connect) -> None:
    with pytest.raises(Redirected):
        connect(App(lambda request: httpx.Response(307))).abort("r")


@pytest.mark.parametrize("stream", [False, True])
def test_redirect_loop_ends(connect: Connect, stream: bool) -> None:
    app = App(moved())
    client = connect(app, retry=Retry(), clock=FakePace())
    with pytest.raises(Redirected):
        client.rollout(["hello"]) if stream else client.abort("r")
    assert len(app.requests) == 3


@pytest.mark.parametrize(
    ("host", "replicas"),
    [
        ("b.pods.test", ["*.pods.test"]),
        ("b.test", ["a.test", "B.test"]),
        ("10.1.2.3", ["10.1.0.0/16"]),
        ("10.1.2.3", ["10.1.2.3"]),
        ("[fd00::7]", ["fd00::/8"]),
        ("coppice.test", []),
    ],
)
def test_listed_hosts_are_trusted(host: str, replicas: list[str]) -> None:
    trust = RedirectPolicy("http://coppice.test:8000/gate", replicas)
    assert (
        trust.redirect_base_url(f"http://{host}:1/p/v1/x%20y?a=b", "/v1/x%20y")
        == f"http://{host}:1/p"
    )


@pytest.mark.parametrize(
    ("host", "replicas"),
    [
        ("pods.test", ["*.pods.test"]),
        ("evilpods.test", ["*.pods.test"]),
        ("10.2.0.1", ["10.1.0.0/16"]),
        ("b.test", ["a.test"]),
    ],
)
def test_unlisted_hosts_are_not_trusted(host: str, replicas: list[str]) -> None:
    with pytest.raises(Redirected) as caught:
        RedirectPolicy("http://coppice.test", replicas).redirect_base_url(
            f"http://{host}/v1/x", "/v1/x"
        )
    assert "replicas" in str(caught.value)


def test_invalid_address_is_not_followed() -> None:
    with pytest.raises(Redirected):
        RedirectPolicy("http://coppice.test").redirect_base_url("http://[::1/v1/x", "/v1/x")


@pytest.mark.parametrize("entry", ["", "*", "a.*.b", "http://a"])
def test_entry_without_a_host_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="not a host name"):
        RedirectPolicy("http://coppice.test", [entry])


class Front(BaseHTTPRequestHandler):
    """A replica without data that redirects every request."""

    protocol_version = "HTTP/1.1"

    def send_on(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        assert isinstance(self.server, Fronts)
        self.send_response(307)
        self.send_header("Location", self.server.to + self.path)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST = do_DELETE = send_on

    def log_message(self, format: str, *args: object) -> None:
        """Suppresses request logs."""


class Fronts(ThreadingHTTPServer):
    to = ""


@contextmanager
def sending_on(to: str) -> Iterator[str]:
    with Fronts(("127.0.0.1", 0), Front) as front:
        front.to = to
        thread = threading.Thread(target=front.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{front.server_port}"
        finally:
            front.shutdown()
            thread.join()


def test_prompt_kv_is_fetched_from_the_replica_that_has_it(tmp_path: Path) -> None:
    with server(tmp_path) as url:
        handle = handle_from(url)
        with sending_on(url) as front:
            source = KvSource(front, transports=["http"])
            with fetched(handle, source) as kv:
                assert_right(kv)
        assert source.counts == {"http": 1}


def test_prompt_kv_is_recomputed_if_its_replica_is_untrusted(tmp_path: Path) -> None:
    with server(tmp_path) as url:
        handle = handle_from(url)
        with sending_on("http://evil.test") as front:
            source = KvSource(front, transports=["http"])
            assert PromptKV.fetch(handle, source) is None
    assert source.counts == {"Redirected": 1}


def test_pending_rollout_is_reachable_through_any_replica(connect: Connect, tmp_path: Path) -> None:
    with server(tmp_path) as url, sending_on(url) as front:
        pending = connect(base_url=front).submit(["hello"], max_tokens=3)
        assert list(pending.wait(30).groups[0].samples[0].token_ids) == [5, 6, 7]
        assert [record.type for record in pending.stream()][-1] == "end"

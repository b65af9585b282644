import httpx
import pytest

from coppice import BadAnswer, ConnectionFailed, CoppiceError, StreamBroken, TimedOut
from tests.client.answers import LINES
from tests.client.app import App, Body, failing, streaming
from tests.client.conftest import Connect

CASES: list[tuple[httpx.RequestError, type[CoppiceError]]] = [
    (httpx.ConnectError("refused"), ConnectionFailed),
    (httpx.ReadError(""), ConnectionFailed),
    (httpx.WriteError(""), ConnectionFailed),
    (httpx.ProxyError(""), ConnectionFailed),
    (httpx.RemoteProtocolError("no answer"), ConnectionFailed),
    (httpx.LocalProtocolError("too little data"), ConnectionFailed),
    (httpx.ConnectTimeout(""), TimedOut),
    (httpx.ReadTimeout(""), TimedOut),
    (httpx.WriteTimeout(""), TimedOut),
    (httpx.DecodingError(""), BadAnswer),
]


@pytest.mark.parametrize(("raised", "expected"), CASES)
def test_httpx_errors_are_converted(
    connect: Connect, raised: httpx.RequestError, expected: type[CoppiceError]
) -> None:
    with pytest.raises(expected) as caught:
        connect(App(failing(raised))).resume()
    is_shown = not isinstance(raised, httpx.ConnectError | httpx.ConnectTimeout)
    assert caught.value.__cause__ is (raised if is_shown else None)
    assert caught.value.__suppress_context__
    assert "POST http://coppice.test/v1/resume" in str(caught.value)


@pytest.mark.parametrize(("raised", "expected"), CASES)
def test_stream_that_cannot_begin_is_not_a_broken_stream(
    connect: Connect, raised: httpx.RequestError, expected: type[CoppiceError]
) -> None:
    with pytest.raises(expected):
        connect(App(failing(raised))).rollout(["hello"])


@pytest.mark.parametrize("raised", [httpx.ReadError(""), httpx.RemoteProtocolError("cut")])
def test_lost_connection_is_a_broken_stream(connect: Connect, raised: httpx.RequestError) -> None:
    body = Body(LINES[:3], raised)
    with pytest.raises(StreamBroken) as caught:
        connect(App(streaming(body))).rollout(["hello"])
    assert caught.value.__cause__ is raised
    assert body.closed


def test_silent_stream_times_out(connect: Connect) -> None:
    body = Body(LINES[:3], httpx.ReadTimeout(""))
    with pytest.raises(TimedOut):
        connect(App(streaming(body))).rollout(["hello"])


def test_complete_stream_ignores_how_its_connection_ends(connect: Connect) -> None:
    body = Body(LINES, httpx.ReadError(""))
    result = connect(App(streaming(body))).rollout(["hello"])
    assert result.outcome == "done"


def test_key_is_sent_as_a_bearer_token(connect: Connect) -> None:
    app = App(streaming(Body(LINES)))
    connect(app, api_key="sesame").rollout(["hello"])
    assert app.request.headers["Authorization"] == "Bearer sesame"


def test_without_a_key_no_credentials_are_sent(connect: Connect) -> None:
    app = App(streaming(Body(LINES)))
    connect(app).rollout(["hello"])
    assert "Authorization" not in app.request.headers


def test_base_url_may_have_a_path_prefix(connect: Connect) -> None:
    app = App(streaming(Body(LINES)))
    connect(app, base_url="https://cluster.test/coppice/").rollout(["hello"])
    assert str(app.request.url) == "https://cluster.test/coppice/v1/rollouts"


@pytest.mark.parametrize("base_url", ["cluster.test:8000", "ftp://cluster.test", ""])
def test_address_without_http_is_refused_at_once(connect: Connect, base_url: str) -> None:
    with pytest.raises(ValueError, match="base_url"):
        connect(base_url=base_url)


@pytest.mark.parametrize(
    ("usual", "asked", "connect_seconds", "read_seconds"),
    [(60.0, None, 60.0, None), (60.0, 600.0, 60.0, 600.0), (None, 5.0, 5.0, 5.0)],
)
def test_weights_calls_have_their_own_timeout(
    connect: Connect,
    usual: float | None,
    asked: float | None,
    connect_seconds: float,
    read_seconds: float | None,
) -> None:
    app = App(failing(httpx.ReadTimeout("")))
    with pytest.raises(TimedOut):
        connect(app, timeout=usual).activate_weights("v7", timeout=asked)
    timeout = app.request.extensions["timeout"]
    assert (timeout["connect"], timeout["read"]) == (connect_seconds, read_seconds)


def test_no_call_waits_for_a_free_connection(connect: Connect) -> None:
    app = App(streaming(Body(LINES)))
    connect(app).rollout(["hello"])
    assert app.request.extensions["timeout"]["pool"] is None

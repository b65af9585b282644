import base64
import logging
import traceback
from typing import Any

import httpx
import pytest

from coppice import CoppiceError, Retry, Unauthorized
from coppice.transport.redirects import parse_address
from tests.client.app import App, failing, refusing
from tests.client.conftest import Connect
from tests.client.fake_clock import FakePace

KEY = "s3same-0pen"
WAYS: list[dict[str, Any]] = [
    {"api_key": KEY},
    {"base_url": f"http://trainer:{KEY}@coppice.test/prefix"},
]


def ask(connect: Connect, app: App, **options: Any) -> None:
    with pytest.raises(CoppiceError):
        connect(app, **options).status()


def basic(user: str, key: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{key}".encode()).decode()


def test_credentials_in_the_url_are_sent_as_basic(connect: Connect) -> None:
    app = App(refusing("unauthorized", 401))
    ask(connect, app, base_url=f"http://trainer:{KEY}@coppice.test/prefix")
    assert app.request.headers["Authorization"] == basic("trainer", KEY)
    assert str(app.request.url) == "http://coppice.test/prefix/v1/status"


@pytest.mark.parametrize(
    ("base_url", "user", "key"),
    [("http://:k@h", "", "k"), ("http://a%40b:c%2Fd%3A%25@h", "a@b", "c/d:%")],
)
def test_credentials_in_the_url_are_unescaped(base_url: str, user: str, key: str) -> None:
    address = parse_address(base_url, None)
    assert (address.base_url, address.authorization) == ("http://h", basic(user, key))


def test_key_is_in_no_repr_no_log_and_no_error(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    spoken: list[str] = []
    for way in WAYS:
        for answer in (
            refusing("unauthorized", 401, detail="wrong key"),
            refusing("overloaded", 503),
            failing(httpx.ConnectError("refused")),
            lambda request: httpx.Response(502, text="no upstream"),
        ):
            client = connect(App(answer), retry=Retry(attempts=2), clock=FakePace(), **way)
            spoken += [repr(client), str(vars(client))]
            with caplog.at_level(logging.DEBUG), pytest.raises(CoppiceError) as caught:
                client.status()
            spoken += traceback.format_exception(caught.value)
            spoken += [repr(caught.value), repr(caught.value.__cause__)]
    text = "\n".join([*spoken, caplog.text, repr(parse_address("http://h", KEY))])
    assert "trying again" in text
    assert KEY not in text
    assert basic("trainer", KEY).removeprefix("Basic ") not in text


@pytest.mark.parametrize(
    "options",
    [
        {"base_url": f"http://trainer:{KEY}@coppice.test", "api_key": KEY},
        {"base_url": f"ftp://trainer:{KEY}@coppice.test"},
        {"base_url": f"http://trainer:{KEY}/x@coppice.test"},
        {"base_url": f"http://trainer:{KEY}@"},
        {"base_url": f"http://{KEY}@coppice.test"},
        {"api_key": f"{KEY}\n"},
        {"api_key": f"{KEY}\u00e9"},
        {"api_key": ""},
    ],
)
def test_invalid_credentials_are_refused_without_being_repeated(
    connect: Connect, options: dict[str, str]
) -> None:
    with pytest.raises(ValueError) as caught:
        connect(**options)
    assert KEY not in "".join(traceback.format_exception(caught.value))
    assert caught.value.__context__ is None


def test_rejected_key_is_not_retried(connect: Connect) -> None:
    app = App(refusing("unauthorized", 401))
    with pytest.raises(Unauthorized):
        connect(app, api_key=KEY, retry=Retry()).status()
    assert len(app.requests) == 1

"""Requests from web pages: DNS rebinding, cross-site forms and images, and the dashboard."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers

from service.config.settings import ServerSettings
from service.errors import Forbidden
from service.http.cross_site import AllowedHosts
from tests.fake_engine import FakeEngine
from tests.service.keyfile import bearer, write_keys
from tests.serving import TLS, Served, serving

CROSS = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}
LINK = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
FRAME = {**LINK, "sec-fetch-dest": "iframe"}
OWN = {"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors", "sec-fetch-dest": "empty"}
TYPED = {**LINK, "sec-fetch-site": "none"}
REBOUND = {"host": "evil.example"}
FIREFOX = {"user-agent": "Mozilla/5.0 (X11; Linux x86_64; rv:130.0) Gecko/20100101 Firefox/130.0"}

PATHS = ["/livez", "/metrics", "/v1/status", "/v1/weights/v0/files/a.safetensors", "/v1/models"]


@asynccontextmanager
async def browser(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    """A client without contract checks: the contract excludes the dashboard and compat routes."""
    async with httpx.AsyncClient(base_url=served.url, verify=TLS) as http:
        yield http


def refused(answer: httpx.Response) -> bool:
    return answer.status_code == 403 and answer.json()["code"] == "forbidden"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("headers", [REBOUND, CROSS, LINK, {"origin": "http://evil.example"}])
async def test_without_keys_foreign_pages_get_no_answer(
    tmp_path: Path, path: str, headers: dict[str, str]
) -> None:
    async with serving(FakeEngine(), tmp_path) as served, browser(served) as http:
        assert not refused(await http.get(path))
        assert refused(await http.get(path, headers=headers))


@pytest.mark.parametrize("port", ["callers", "operators"])
async def test_admin_port_applies_the_same_checks(tmp_path: Path, port: str) -> None:
    server = {"operators_port": 0}
    async with serving(FakeEngine(), tmp_path, server=server) as served:
        app = served.app if port == "callers" else served.app.state.operators
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            assert not refused(await http.get("/v1/status"))
            assert refused(await http.get("/v1/status", headers=REBOUND))


def allowed(name: str, **settings: Any) -> bool:
    try:
        AllowedHosts(ServerSettings(**settings)).check(Headers({"host": name}))
    except Forbidden:
        return False
    return True


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LOCALHOST:8000", "localhost.", "a.localhost:1", "127.0.0.1"),
        *("127.0.0.1:8000", "10.1.2.3:8000", "[::1]", "[::1]:8000", "[fd00::7]:8000"),
        *(socket.gethostname(), f"{socket.gethostname()}:8000"),
    ],
)  # fmt: skip
def test_loopback_addresses_and_the_own_name_are_answered(host: str) -> None:
    assert allowed(host)


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "coppice", ""),
        *("evil.example:8000", "localhost@evil.example", "2130706433", "0x7f.1", "[::1"),
        *("notlocalhost", "127.0.0.1:8000.evil.example", "a b", "evil.example:", "localhost:80:80"),
    ],
)  # fmt: skip
def test_other_names_are_refused(host: str) -> None:
    assert not allowed(host)


@pytest.mark.parametrize(
    ("settings", "host"),
    [
        ({"allowed_hosts": "coppice *.svc.cluster.local"}, "coppice:8000"),
        ({"allowed_hosts": "coppice *.svc.cluster.local"}, "a.b.svc.cluster.local"),
        ({"allowed_hosts": "*"}, "evil.example"),
        ({"host": "gpu-node", "allow_open": True}, "gpu-node:8000"),
        ({"operators_host": "Admin-Node", "allow_open": True}, "admin-node"),
        ({"advertised_url": "http://rollouts.example:80/a"}, "rollouts.example"),
    ],
)
def test_configured_names_are_answered(settings: dict[str, Any], host: str) -> None:
    assert allowed(host, **settings)
    assert not allowed(host)


async def test_with_keys_any_host_name_is_answered(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    key = bearer(write_keys(file, a="rollout")["a"])
    async with serving(FakeEngine(), tmp_path, server={"keys_file": file}) as served:
        answer = await served.http.get("/v1/status", headers={**REBOUND, **key})
        assert answer.status_code == 200


@pytest.mark.parametrize("headers", [CROSS, LINK, {"origin": "null"}, {"origin": "http://evil"}])
async def test_stored_browser_credentials_are_refused_for_other_sites(
    tmp_path: Path, headers: dict[str, str]
) -> None:
    """Browsers send Basic credentials with every request to a host, whichever page makes it."""
    file = tmp_path / "keys.yaml"
    secret = write_keys(file, a="admin")["a"]
    server = {"keys_file": file}
    async with serving(FakeEngine(), tmp_path, server=server) as served, browser(served) as http:
        for method, path in (("POST", "/v1/pause"), ("POST", "/pause"), ("GET", "/flush_cache")):
            answer = await http.request(method, path, headers=headers, auth=("me", secret))
            assert refused(answer), path
        assert not served.server.activation.pauses.paused


async def test_dashboard_can_be_linked_to_and_polls(tmp_path: Path) -> None:
    server = {"ui": True}
    async with serving(FakeEngine(), tmp_path, server=server) as served, browser(served) as http:
        assert (await http.get("/ui", headers=LINK)).status_code == 200
        assert (await http.get("/ui", headers=TYPED)).status_code == 200
        assert (await http.get("/ui/page.js", headers=OWN)).status_code == 200
        async with http.stream("GET", "/ui/events", headers=OWN) as events:
            assert events.status_code == 200
        for path, headers in (("/ui", FRAME), ("/ui", CROSS), ("/ui/events", LINK)):
            assert refused(await http.get(path, headers=headers))


@pytest.mark.parametrize(
    "headers", [OWN, TYPED, FIREFOX, {"referer": "http://evil.example/"}, {"origin": "null"}]
)
async def test_state_changing_get_is_refused_from_browsers(
    tmp_path: Path, headers: dict[str, str]
) -> None:
    """A plain-HTTP page with `<img src=http://10.0.0.7:8000/flush_cache>` sends no such header."""
    async with serving(FakeEngine(), tmp_path) as served, browser(served) as http:
        assert refused(await http.get("/flush_cache", headers=headers))
        assert (await http.get("/flush_cache")).status_code == 200

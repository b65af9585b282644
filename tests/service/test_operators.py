"""The admin port, and the audit log of its calls."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from fastapi.routing import APIRoute

from service.app import create_app
from service.auth.access import declared_access
from service.auth.audit_log import LOGGER
from service.config.settings import LogSettings
from service.config.sources import SettingsError, load_settings
from service.http.serve import open_listener, run_server, server_url
from service.observability.logs import logging_config
from tests.fake_engine import FakeEngine
from tests.ports import free_port
from tests.service.keyfile import bearer, write_keys
from tests.serving import serving, settings_for

OURS = ("/readyz", "/metrics", "/v1/weights", "/v1/rollouts/x")
PROBES = {"/livez", "/readyz", "/startupz", "/health"}


def calls(app: object) -> set[tuple[str, str]]:
    routes = [route for route in app.routes if isinstance(route, APIRoute)]  # type: ignore[attr-defined]
    return {(method, route.path) for route in routes for method in route.methods}


def test_admin_routes_are_only_on_the_admin_port(tmp_path: Path) -> None:
    everything = create_app(settings_for(tmp_path), FakeEngine())
    split = create_app(settings_for(tmp_path, server={"operators_port": 0}), FakeEngine())
    operators = split.state.operators
    assert everything.state.operators is None
    assert calls(split) | calls(operators) == calls(everything)
    both = {*PROBES, "/v1/status", "/problems", "/problems/{code}"}
    assert calls(split) & calls(operators) == {("GET", path) for path in both}
    assert ("GET", "/metrics") not in calls(split)
    for route in split.routes:
        assert isinstance(route, APIRoute)
        access = declared_access(route.endpoint)
        assert access is not None
        assert access.role != "admin"


def test_compat_admin_routes_are_only_on_the_admin_port(tmp_path: Path) -> None:
    shapes = {"compat": ["vllm", "sglang", "openai"]}
    everything = create_app(settings_for(tmp_path, server=shapes), FakeEngine())
    split = create_app(settings_for(tmp_path, server={**shapes, "operators_port": 0}), FakeEngine())
    callers, operators = split.state.compat, split.state.operators.state.compat
    assert calls(callers) | calls(operators) == calls(everything.state.compat)
    assert calls(callers) & calls(operators) == {("GET", "/compat/openapi.json")}
    described = {"/compat/openapi.json"}
    for app, wanted in ((callers, False), (operators, True)):
        routes = [r for r in app.routes if isinstance(r, APIRoute) and r.path not in described]
        found = {
            getattr(declared_access(route.endpoint), "role", None) == "admin" for route in routes
        }
        assert found == {wanted}


def test_admin_port_needs_keys_like_any_other() -> None:
    server = {"operators_port": "9000", "operators_host": "0.0.0.0"}
    with pytest.raises(SettingsError, match=r"host 0\.0\.0\.0 can be reached"):
        load_settings(flags={"server": server}, environ={})
    assert load_settings(flags={"server": {**server, "allow_open": "true"}}, environ={})


def test_both_ports_serve_until_the_drain_ends(tmp_path: Path) -> None:
    operators_port = free_port()
    ports = {"operators_port": operators_port, "compat": ["vllm", "sglang"]}
    settings = settings_for(tmp_path, server=ports)
    app = create_app(settings, FakeEngine())
    statuses: dict[str, int] = {}

    def ask(callers: str) -> None:
        operators = f"http://127.0.0.1:{operators_port}"
        transport = httpx.HTTPTransport(retries=20)
        with httpx.Client(transport=transport, timeout=20) as http:
            while http.get(f"{callers}/readyz").status_code != 200:
                pass
            for name, url in (("callers", callers), ("operators", operators)):
                for path in (*OURS, "/is_paused", "/flush_cache"):
                    statuses[f"{name} {path}"] = http.get(url + path).status_code
        os.kill(os.getpid(), signal.SIGTERM)

    with open_listener("127.0.0.1", 0) as listener:
        asking = threading.Thread(target=ask, args=(server_url(listener),))
        asking.start()
        run_server(app, app.state.server, settings, listener)
        asking.join(timeout=20)
    assert statuses == {
        "callers /readyz": 200,
        "callers /metrics": 404,
        "callers /v1/weights": 404,
        "callers /v1/rollouts/x": 404,  # unknown rollout
        "callers /is_paused": 200,
        "callers /flush_cache": 404,
        "operators /readyz": 200,
        "operators /metrics": 200,
        "operators /v1/weights": 200,
        "operators /v1/rollouts/x": 404,
        "operators /is_paused": 404,
        "operators /flush_cache": 200,
    }
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{operators_port}/readyz")


@contextmanager
def audited() -> Iterator[list[logging.LogRecord]]:
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logger, handler = logging.getLogger(LOGGER), Keep()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


async def test_every_admin_call_is_audited_whether_allowed_or_not(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    keys = write_keys(file, boss="admin", trainer="rollout")
    admin, trainer = bearer(keys["boss"]), bearer(keys["trainer"])
    with audited() as records:
        async with serving(FakeEngine(), tmp_path, server={"keys_file": file}) as served:
            http = served.http
            await http.post("/v1/pause", json={"mode": "keep"}, headers=admin)
            await http.delete("/v1/weights/x%0Ay", headers=admin)
            await http.post("/v1/resume", headers=trainer)
            await http.post("/v1/resume")
            await http.get("/v1/status", headers=trainer)
            await http.get("/livez")
    seen = [(r.__dict__["method"], r.__dict__["route"], r.__dict__["status"]) for r in records]
    assert seen == [
        ("POST", "/v1/pause", 200),
        ("DELETE", "/v1/weights/{version}", 422),
        ("POST", "/v1/resume", 403),
        ("POST", "/v1/resume", 401),
    ]
    assert records[1].__dict__["version"] == r"'x\ny'"
    assert records[0].__dict__["address"] == "127.0.0.1"


def test_audit_log_is_written_at_every_level() -> None:
    config = logging_config(LogSettings(level="error"))
    assert config["loggers"][LOGGER] == {"handlers": [], "propagate": True, "level": "INFO"}

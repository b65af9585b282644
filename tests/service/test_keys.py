"""API keys, roles, and refusal of callers without a key."""

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from fastapi.routing import APIRoute

from service.app import create_app
from service.auth.access import declared_access
from service.auth.keys import LOCAL_KEY, ROLES, Keyring, match_key, read_keys
from service.config.sources import SettingsError, load_settings
from service.log_context import current_ids
from tests.fake_engine import FakeEngine
from tests.service.command_line import run_command
from tests.service.keyfile import bearer, entries, write_keys
from tests.service.test_rollouts import body, group, running_samples
from tests.serving import serving, settings_for

PUBLIC = ["/livez", "/readyz", "/startupz", "/health", "/metrics", "/openapi.yaml", "/problems"]
PROTECTED = [
    ("POST", "/v1/rollouts", "rollout"),
    ("GET", "/v1/rollouts/x", "rollout"),
    ("DELETE", "/v1/rollouts/x", "rollout"),
    ("POST", "/v1/score", "rollout"),
    ("GET", "/v1/weights", "admin"),
    ("PUT", "/v1/weights/v1", "admin"),
    ("PUT", "/v1/weights/v1/files/model.safetensors", "admin"),
    ("GET", "/v1/weights/v1/files/model.safetensors", "replica"),
    ("POST", "/v1/weights/v1", "admin"),
    ("POST", "/v1/weights/v1/activate", "admin"),
    ("DELETE", "/v1/weights/v1", "admin"),
    ("POST", "/v1/pause", "admin"),
    ("POST", "/v1/resume", "admin"),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# The key file


def test_new_key_is_printed_once_and_its_lines_grant_access(file: Path) -> None:
    made = run_command("new-key", "trainer", "--roles", "rollout,kv")
    assert made.exit_code == 0
    secret = made.stderr.split()[-1]
    assert secret not in made.stdout
    file.write_text(made.stdout)
    key = match_key(read_keys(file), secret)
    assert key is not None
    assert (key.name, sorted(key.roles)) == ("trainer", ["kv", "rollout"])


def test_new_keys_differ() -> None:
    made = [run_command("new-key", "x", "--roles", "kv") for _ in range(2)]
    assert made[0].stderr != made[1].stderr


@pytest.mark.parametrize(("name", "roles"), [("x y", "kv"), ("x", "root"), ("x", "")])
def test_key_that_the_file_could_not_contain_is_not_made(name: str, roles: str) -> None:
    refused = run_command("new-key", name, "--roles", roles)
    assert (refused.exit_code, refused.stdout) == (2, "")


def test_file_contains_no_key(file: Path) -> None:
    secret = write_keys(file, trainer="rollout")["trainer"]
    assert secret not in file.read_text()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "contains no key"),
        ("[]", "contains no key"),
        ("keys: hunter2", "valid tuple"),
        ("- hunter2", "0: Input should be a valid dictionary"),
        ("- {name: a, roles: [root], sha256: hunter2}", "0.roles.0: Input should be 'rollout'"),
        ("- {name: a, roles: [], sha256: hunter2}", "0.roles: Tuple should have at least 1"),
        ("- {name: a, roles: [kv], key: hunter2}", "0.key: Extra inputs are not permitted"),
        ("- {name: a\n  hunter2: [", "line 2"),
    ],
)
def test_invalid_file_is_refused_without_quoting_it(file: Path, content: str, said: str) -> None:
    file.write_text(content)
    with pytest.raises(SettingsError, match=said) as caught:
        read_keys(file)
    assert "hunter2" not in str(caught.value)
    assert all(line.startswith(str(file)) for line in caught.value.lines)


@pytest.mark.parametrize("field", ["name", "sha256"])
def test_keys_may_not_share_a_name_or_a_hash(file: Path, field: str) -> None:
    write_keys(file, a="kv", b="kv")
    first, second = entries(file)
    file.write_text(yaml.safe_dump([first, {**second, field: first[field]}]))
    with pytest.raises(SettingsError, match=f"the same {field}"):
        read_keys(file)


@pytest.mark.parametrize("command", ["serve", "check-config"])
def test_missing_key_file_fails_the_start_with_one_line(command: str, tmp_path: Path) -> None:
    file = tmp_path / "none.yaml"
    result = run_command(command, "--server.keys-file", str(file))
    assert result.exit_code == 2
    assert result.stderr == f"coppice: {file}: No such file or directory\n"


def test_keys_allow_addresses_other_than_loopback(file: Path) -> None:
    flags = {"server": {"host": "0.0.0.0", "keys_file": str(file)}}
    assert load_settings(flags=flags, environ={}).server.host == "0.0.0.0"


# The keyring


def test_changed_file_is_reloaded_after_a_second(file: Path) -> None:
    clock = Clock()
    old = write_keys(file, a="kv")["a"]
    keyring = Keyring(file, clock=clock)
    new = write_keys(file, fresh="rollout")["fresh"]
    clock.now = 0.9
    assert keyring.find(old) is not None
    clock.now = 1.0
    assert keyring.find(old) is None
    key = keyring.find(new)
    assert key is not None and key.name == "fresh"


@pytest.mark.parametrize("breakage", ["gone", "empty", "wrong"])
def test_broken_file_keeps_the_old_keys_and_is_logged_once(
    file: Path, breakage: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    secret = write_keys(file, a="kv")["a"]
    keyring = Keyring(file, clock=clock)
    if breakage == "gone":
        file.unlink()
    else:
        file.write_text("" if breakage == "empty" else "- hunter2")
    for clock.now in (1.0, 2.0, 3.0):
        assert keyring.find(secret) is not None
    [record] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "the previous keys stay valid" in record.message
    assert "hunter2" not in caplog.text
    renewed = write_keys(file, a="kv")["a"]
    clock.now = 4.0
    assert keyring.find(renewed) is not None


def test_replaced_symbolic_link_is_a_change(tmp_path: Path) -> None:
    """Kubernetes updates a mounted secret in this way."""
    clock = Clock()
    old = write_keys(tmp_path / "1.yaml", a="kv")["a"]
    new = write_keys(tmp_path / "2.yaml", a="kv")["a"]
    link = tmp_path / "keys.yaml"
    link.symlink_to("1.yaml")
    keyring = Keyring(link, clock=clock)
    (tmp_path / "next").symlink_to("2.yaml")
    os.replace(tmp_path / "next", link)
    clock.now = 1.0
    assert (keyring.find(old), keyring.find(new) is not None) == (None, True)


def test_without_a_key_file_every_caller_is_local() -> None:
    assert Keyring(None).accepts_anyone
    assert (LOCAL_KEY.name, LOCAL_KEY.roles) == ("local", ROLES)


# Routes


async def test_public_routes_need_no_key(tmp_path: Path, file: Path) -> None:
    write_keys(file, a="kv")
    async with serving(FakeEngine(), tmp_path, server={"keys_file": file}) as served:
        for path in PUBLIC:
            for headers in ({}, bearer("wrong")):
                assert (await served.http.get(path, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer \xe9"},
        {"authorization": "Basic"},
        {"authorization": "Basic ###"},
        {"authorization": "Basic bm9jb2xvbg=="},
        {"authorization": "Basic /////w=="},
        {"authorization": "Digest x"},
        {"x-api-key": "KEY"},
        {"authorization": "KEY"},
        {"authorization": "Basic KEY"},
        {"authorization": "Bearer KEYx"},
        [("authorization", "Bearer KEY"), ("authorization", "Bearer KEY")],
    ],
    ids=repr,
)
async def test_without_a_valid_key_every_other_route_answers_401(
    tmp_path: Path, file: Path, headers: Any
) -> None:
    secret = write_keys(file, a="rollout,kv,admin")["a"]
    pairs = headers.items() if isinstance(headers, dict) else headers
    sent = [(name, value.replace("KEY", secret).encode("latin-1")) for name, value in pairs]
    async with serving(FakeEngine(), tmp_path, server={"keys_file": file}) as served:
        for method, path, _ in [*PROTECTED, ("GET", "/v1/status", "")]:
            answer = await served.http.request(method, path, headers=sent)
            assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")
            assert answer.headers["www-authenticate"] == 'Bearer realm="coppice"'


async def test_key_is_limited_to_its_roles(tmp_path: Path, file: Path) -> None:
    keys = write_keys(file, rollout="rollout", kv="kv", admin="admin")
    async with serving(FakeEngine(), tmp_path, server={"keys_file": file}) as served:
        for method, path, needed in PROTECTED:
            for role, secret in keys.items():
                answer = await served.http.request(method, path, headers=bearer(secret))
                assert answer.status_code != 401
                assert (answer.status_code == 403) == (role != needed), (method, path, role)
        for secret in keys.values():
            answer = await served.http.get("/v1/status", headers=bearer(secret))
            assert answer.status_code == 200


async def test_key_may_be_sent_as_a_basic_password_with_any_user(
    tmp_path: Path, file: Path
) -> None:
    secret = write_keys(file, a="rollout")["a"]
    async with serving(FakeEngine(), tmp_path, server={"keys_file": file}) as served:
        for user in ("", "anybody", "\xe9"):
            answer = await served.http.get("/v1/status", auth=(user, secret))
            assert answer.status_code == 200
        swapped = await served.http.get("/v1/status", auth=(secret, "anybody"))
        assert swapped.status_code == 401


async def test_rollout_is_invisible_to_another_key(tmp_path: Path, file: Path) -> None:
    keys = write_keys(file, a="rollout", b="rollout,admin")
    async with serving(FakeEngine(instant=False), tmp_path, server={"keys_file": file}) as served:
        asked = served.http.post("/v1/rollouts", json=body(group(1)), headers=bearer(keys["a"]))
        waiting = asyncio.create_task(asked)
        await running_samples(served, 1)
        [rollout_id] = served.server.rollouts._running
        path = f"/v1/rollouts/{rollout_id}"
        foreign = await served.http.delete(path, headers=bearer(keys["b"]))
        unknown = await served.http.delete("/v1/rollouts/x", headers=bearer(keys["b"]))
        assert _bare(foreign) == _bare(unknown)
        assert foreign.json()["code"] == "rollout_not_found"
        looked = await served.http.get(path, headers=bearer(keys["b"]))
        assert looked.json()["code"] == "rollout_not_found"
        assert (await served.http.delete(path, headers=bearer(keys["a"]))).status_code == 200
        assert (await waiting).json()["outcome"] == "cancelled"


async def test_idempotency_keys_are_scoped_to_the_api_key(tmp_path: Path, file: Path) -> None:
    keys = write_keys(file, a="rollout", b="rollout")
    async with serving(FakeEngine(), tmp_path, server={"keys_file": file}) as served:
        found = []
        for name in "aab":
            headers = {**bearer(keys[name]), "idempotency-key": "step-7"}
            answer = await served.http.post("/v1/rollouts", json=body(group(1)), headers=headers)
            found.append(answer.json()["id"])
    assert found[0] == found[1] != found[2]


def _bare(answer: httpx.Response) -> dict[str, Any]:
    return {**answer.json(), "request_id": None}


async def test_without_keys_everything_is_allowed_except_from_web_pages(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        assert (await served.http.post("/v1/pause")).status_code == 200
        for origin in ("http://evil.example", "null", served.url):
            answer = await served.http.post("/v1/resume", headers={"origin": origin})
            assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
        assert served.server.activation.pauses.paused


async def test_route_without_a_declaration_is_refused(tmp_path: Path, file: Path) -> None:
    secret = write_keys(file, a="rollout,kv,admin")["a"]
    for sections in ({}, {"server": {"keys_file": file}}):
        app = create_app(settings_for(tmp_path, **sections), FakeEngine())
        app.get("/livez/new")(lambda: "forgotten")
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            answer = await http.get("/livez/new", headers=bearer(secret))
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")


def test_every_route_declares_its_access(tmp_path: Path) -> None:
    """A mount or a plain route would bypass the app's dependencies."""
    app = create_app(settings_for(tmp_path), FakeEngine())
    for route in app.routes:
        assert isinstance(route, APIRoute), route
        assert declared_access(route.endpoint) is not None, route.path
    public = {
        route.path
        for route in app.routes
        if isinstance(route, APIRoute)
        and (access := declared_access(route.endpoint))
        and access.public
    }
    assert public == {*PUBLIC, "/", "/docs", "/docs/{name}", "/problems/{code}"}


async def test_key_name_is_logged_and_the_key_is_not(
    tmp_path: Path, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = write_keys(file, trainer="rollout")["trainer"]
    ids: list[dict[str, str]] = []

    class Ids(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            ids.append(current_ids())
            return True

    caplog.handler.addFilter(Ids())
    with caplog.at_level("DEBUG"):
        async with serving(FakeEngine(), tmp_path, server={"keys_file": file}) as served:
            await served.http.post("/v1/rollouts", json=body(group(1)), headers=bearer(secret))
    assert "trainer" in {logged.get("key_name") for logged in ids if "rollout_id" in logged}
    assert secret not in caplog.text


def test_contract_documents_the_access_of_every_route(tmp_path: Path) -> None:
    contract = yaml.safe_load((Path(__file__).parents[2] / "openapi.yaml").read_text())
    app = create_app(settings_for(tmp_path), FakeEngine())
    for route in app.routes:
        assert isinstance(route, APIRoute)
        access = declared_access(route.endpoint)
        assert access is not None
        roles = [] if access.role is None else [access.role]
        expected = [] if access.public else [{"bearer": roles}, {"basic": roles}]
        for method in route.methods:
            operation = contract["paths"][route.path][method.lower()]
            assert operation.get("security", contract["security"]) == expected, route.path
            assert access.public or {"401", "403"} <= operation["responses"].keys()

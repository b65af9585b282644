"""The compat sub-application: mounted after the native routes, same auth, own OpenAPI document."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from openapi_spec_validator import validate

from service.app import create_app
from service.auth.access import declared_access
from service.config.settings import CompatApi
from tests.compat.third_party import foreign
from tests.fake_engine import FakeEngine
from tests.service.keyfile import bearer, write_keys
from tests.serving import settings_for

PUBLIC = {"/liveness", "/health_generate", "/compat/openapi.json"}
ADMIN = [
    *("/pause", "/resume", "/start_weight_update", "/update_weights", "/finish_weight_update"),
    *("/reset_prefix_cache", "/flush_cache", "/pause_generation", "/continue_generation"),
    *("/update_weights_from_disk", "/load_lora_adapter", "/init_weight_transfer_engine"),
]
ROLLOUT = [
    *("/v1/completions", "/v1/chat/completions", "/inference/v1/generate"),
    *("/generate", "/abort_request", "/v1/responses"),
]


def compat(tmp_path: Path, *shapes: CompatApi) -> tuple[FastAPI, list[APIRoute]]:
    app = create_app(settings_for(tmp_path, server={"compat": shapes}), FakeEngine())
    routes = app.state.compat.routes
    assert all(isinstance(route, APIRoute) for route in routes)
    return app, list(routes)


def test_every_route_declares_its_access(tmp_path: Path) -> None:
    _, routes = compat(tmp_path, "vllm", "sglang", "openai", "anthropic")
    access = {route.path: declared_access(route.endpoint) for route in routes}
    assert None not in access.values()
    assert {path for path, found in access.items() if found and found.public} == PUBLIC


def test_no_compat_path_is_a_native_path(tmp_path: Path) -> None:
    app, routes = compat(tmp_path, "vllm", "sglang", "openai", "anthropic")
    ours = {route.path for route in app.routes if isinstance(route, APIRoute)}
    assert ours.isdisjoint(route.path for route in routes)


@pytest.mark.parametrize(
    ("shapes", "there", "missing"),
    [
        ((), [], ["/v1/models", "/generate", "/pause", "/v1/completions"]),
        (("openai",), ["/v1/models", "/v1/completions"], ["/generate", "/pause"]),
        (("openai",), ["/v1/responses"], ["/v1/messages"]),
        (("anthropic",), ["/v1/messages", "/v1/messages/count_tokens"], ["/v1/completions"]),
        (("vllm",), ["/v1/messages", "/v1/responses"], []),
        (("vllm",), ["/v1/completions", "/pause", "/inference/v1/generate"], ["/generate"]),
        (("sglang",), ["/generate", "/pause_generation"], ["/pause"]),
    ],
)
def test_only_configured_apis_are_served(
    tmp_path: Path, shapes: tuple[CompatApi, ...], there: list[str], missing: list[str]
) -> None:
    _, routes = compat(tmp_path, *shapes)
    paths = {route.path for route in routes}
    assert paths >= set(there)
    assert paths.isdisjoint(missing)


async def test_roles_are_required(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    secrets = write_keys(file, trainer="rollout", operator="admin")
    async with foreign(tmp_path, server={"keys_file": file}) as served:
        for path in (*ADMIN, *ROLLOUT):
            assert (await served.refused(path, {}))[0] == 401, path
            wrong = secrets["trainer" if path in ADMIN else "operator"]
            assert (await served.refused(path, {}, headers=bearer(wrong)))[0] == 403, path
        assert (await served.http.get("/v1/models")).status_code == 401


async def test_basic_credentials_in_the_url_are_accepted(tmp_path: Path) -> None:
    """TRL's client has no argument for a key, but keeps credentials of its base URL."""
    file = tmp_path / "keys.yaml"
    secret = write_keys(file, trainer="rollout")["trainer"]
    async with foreign(tmp_path, server={"keys_file": file}) as served:
        answer = await served.http.get("/v1/models", auth=("rollout", secret))
    assert answer.status_code == 200


async def test_unknown_paths_and_methods_are_problems(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        assert (await served.refused("/no/such/address"))[1]["code"] == "not_found"
        wrong = await served.http.get("/v1/completions")
        ours = await served.http.put("/v1/pause")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert (ours.status_code, ours.headers["allow"]) == (405, "POST")


async def test_compat_routes_have_their_own_openapi_document(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        document: dict[str, Any] = (await served.http.get("/compat/openapi.json")).json()
    validate(document)
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]
    reference = {"$ref": "#/components/schemas/completions.request"}
    assert body["application/json"]["schema"] == reference
    schemas = document["components"]["schemas"]
    given, extra = schemas["completions.request"]["allOf"]
    assert given == {"$ref": "#/components/schemas/vllm.CompletionRequest"}
    assert "prompt" in schemas["vllm.CompletionRequest"]["properties"]
    assert extra == {"$ref": "#/components/schemas/ExtraFields"}


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("/init_weight_transfer_engine", "coppice.integrations.trl"),
        ("/load_lora_adapter", "engine.max_adapters"),
        ("/update_weights_from_tensor", "update_weights_from_disk"),
    ],
)
async def test_unsupported_route_names_its_alternative(
    tmp_path: Path, path: str, instead: str
) -> None:
    async with foreign(tmp_path) as served:
        status, problem = await served.refused(
            path, {"init_info": {}, "lora_name": "a", "lora_path": "/a"}
        )
    assert (status, problem["code"]) == (422, "unsupported")
    assert instead in problem["detail"]


async def test_drain_applies_to_compat_clients(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        await served.server.drain(0)
        answer: httpx.Response = await served.http.post("/v1/completions", json={"prompt": "a"})
    assert (answer.status_code, answer.json()["code"]) == (503, "draining")

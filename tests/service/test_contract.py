"""openapi.yaml matches the app: operations, responses, types and problems."""

from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from pydantic import BaseModel

from coppice.wire.problem_catalogue import PROBLEMS
from service.app import create_app
from tests.contract.document import document, operations, schemas
from tests.contract.models import differences, wire_models
from tests.fake_engine import FakeEngine
from tests.serving import settings_for

# Components without a model: shared types, the union of records, and a file.
NO_MODELS = {
    "KvVersions",
    *("TokenId", "Label", "AdapterName", "FinishReason", "SegmentFinish", "Outcome", "Stage"),
    "SleepTag",
    *("SessionState", "SessionEndReason", "AttachReason", "SessionsRecord"),
    *("Record", "PackedAnswer", "PackedRequest", "KvReason", "KvReuseReason"),
}

Answers = dict[tuple[str, str], dict[str, set[str]]]


@pytest.fixture
def routes(tmp_path: Path) -> list[APIRoute]:
    routes = create_app(settings_for(tmp_path), FakeEngine()).routes
    assert all(isinstance(route, APIRoute) for route in routes)
    return [route for route in routes if isinstance(route, APIRoute)]


def declared(routes: list[APIRoute]) -> Answers:
    """Statuses and their media types by method and path, as the routes declare them."""
    return {
        (method, route.path): {
            str(status): set(answer["content"]) for status, answer in route.responses.items()
        }
        for route in routes
        for method in route.methods
    }


def documented() -> Answers:
    return {
        (operation.method, operation.path): {
            status: operation.media_types(status) for status in operation.responses
        }
        for operation in operations()
    }


def test_contract_and_app_have_the_same_operations(routes: list[APIRoute]) -> None:
    assert declared(routes).keys() == documented().keys()


def test_contract_and_app_declare_the_same_responses(routes: list[APIRoute]) -> None:
    app, contract = declared(routes), documented()
    for operation in app.keys() | contract.keys():
        assert app.get(operation) == contract.get(operation), operation


def test_every_name_in_a_path_is_a_parameter(routes: list[APIRoute]) -> None:
    names = {route.path: set(route.param_convertors) for route in routes}
    for operation in operations():
        parameters = [p["name"] for p in operation.node["parameters"] if p["in"] == "path"]
        assert set(parameters) == names[operation.path], operation.path


def test_every_used_security_scheme_is_defined() -> None:
    described = document()["components"]["securitySchemes"].keys()
    for holder in (document(), *(operation.node for operation in operations())):
        for requirement in holder.get("security", []):
            assert requirement.keys() <= described


def test_operation_ids_are_unique() -> None:
    names = [operation.node["operationId"] for operation in operations()]
    assert len(set(names)) == len(names)


def test_wire_models_and_components_correspond() -> None:
    assert schemas().keys() - NO_MODELS == wire_models().keys()


@pytest.mark.parametrize("name", sorted(wire_models()))
def test_wire_model_matches_its_component(name: str) -> None:
    assert differences(wire_models()[name], schemas()[name]) == []


def test_problems_of_contract_and_error_table_are_equal() -> None:
    codes = schemas()["Problem"]["properties"]["code"]["enum"]
    assert codes == list(PROBLEMS)
    for kind in PROBLEMS.values():
        assert str(kind.status) in _statuses() or kind.status in (404, 405), kind


def _statuses() -> set[str]:
    return {status for operation in operations() for status in operation.responses}


def changes() -> list[Any]:
    """One change per component, which the comparison must detect."""
    changed: list[tuple[Any, ...]] = [
        ("Sampling", "properties", "top_k", "maximum", 5),
        ("Sampling", "properties", "top_k", "type", "number"),
        ("Sampling", "properties", "top_p", "default", 0.5),
        ("Sampling", "properties", "more", {"type": "string"}),
        ("Sampling", "additionalProperties", True),
        ("RolloutRequest", "required", []),
        ("Prompt", "properties", "token_ids", "items", "maximum", 5),
        ("Prompt", "properties", "text", "type", "string"),
        ("IpcTensor", "properties", "handles", "propertyNames", "pattern", "^a$"),
        ("IpcTensor", "properties", "handles", "additionalProperties", "required", ["handle"]),
        ("WeightsConstraint", "properties", "min_version", {"type": "string"}),
        ("PauseRequest", "properties", "mode", "enum", ["keep"]),
        ("VersionAnswer", "required", ["version"]),
        ("StartRecord", "properties", "type", "const", "begin"),
        ("PauseAnswer", "properties", "paused", "type", ["boolean", "null"]),
    ]
    return [pytest.param(n, path, value, id=".".join((n, *path))) for n, *path, value in changed]


@pytest.mark.parametrize(("name", "path", "value"), changes())
def test_comparison_detects_every_change(name: str, path: list[str], value: Any) -> None:
    model: type[BaseModel] = wire_models()[name]
    assert differences(model, _changed(schemas()[name], path, value))


def _changed(node: dict[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    first, *rest = path
    return {**node, first: _changed(node[first], rest, value) if rest else value}

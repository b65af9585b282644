"""Comparison of pydantic wire models with the contract components of the same name.

Requests must match exactly: names, required members, types, enums, bounds. For answers the contract
may be stricter than the model, which tolerates newer servers: a bound, a member that is always
present, a null that is never sent.
"""

import inspect
from collections.abc import Iterator
from types import ModuleType

from pydantic import BaseModel

from coppice.wire import (
    branching,
    chat,
    cuda_ipc_weights,
    handoff,
    kv_reuse,
    pause,
    problem_catalogue,
    prompt_kv,
    rollouts,
    sampling,
    score,
    sessions,
    status,
    weights,
)
from coppice.wire.base import RequestModel
from coppice.wire.columns import (
    kv_version_spans,
    logprobs,
    routed_experts,
    support,
    weights_version_spans,
)
from coppice.wire.packed import results
from tests.contract.document import Node, resolved

MODULES: tuple[ModuleType, ...] = (
    branching,
    chat,
    pause,
    status,
    handoff,
    prompt_kv,
    problem_catalogue,
    results,
    kv_reuse,
    kv_version_spans,
    logprobs,
    rollouts,
    routed_experts,
    sampling,
    score,
    sessions,
    support,
    weights_version_spans,
    cuda_ipc_weights,
    weights,
)
WITHOUT_ROUTE = ("VersionedState", "RolloutState", "SessionsState")
"""Models that no route receives: states, of which offers consist."""
BOUNDS = ("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "pattern")
EXCLUSIVE = {"exclusiveMinimum": ("minimum", 1), "exclusiveMaximum": ("maximum", -1)}


def wire_models() -> dict[str, type[BaseModel]]:
    return {
        name: model
        for module in MODULES
        for name, model in inspect.getmembers(module, inspect.isclass)
        if issubclass(model, BaseModel) and model.__module__ == module.__name__
        if name not in WITHOUT_ROUTE
    }


def differences(model: type[BaseModel], contract: Node) -> list[str]:
    described = model.model_json_schema()
    schema = resolved(described, described)
    assert isinstance(schema, dict)
    exact = issubclass(model, RequestModel)
    return list(_differences(contract, schema, exact, model.__name__))


def _differences(contract: Node, model: Node, exact: bool, at: str) -> Iterator[str]:
    ours, theirs = _normal(contract), _normal(model)
    if "properties" in theirs and theirs.get("additionalProperties") is not False:
        exact = False  # an answer inside a request
    yield from _keywords(ours, theirs, exact, at)
    yield from _members(ours, theirs, exact, at)
    for key in ("items", "additionalProperties"):
        if _have_schemas(ours, theirs, key):
            yield from _differences(ours[key], theirs[key], exact, f"{at}[]")


def _keywords(ours: Node, theirs: Node, exact: bool, at: str) -> Iterator[str]:
    same = ("type", "additionalProperties", "nullable", *BOUNDS) if exact else ("type",)
    for key in same:
        if not _have_schemas(ours, theirs, key) and ours.get(key) != theirs.get(key):
            yield f"{at}: {key} is {ours.get(key)}, the model's {theirs.get(key)}"
    if ours.get("enum") != theirs.get("enum") and (exact or "enum" in theirs):
        yield f"{at}: the enums differ"
    if ours["nullable"] and not theirs["nullable"]:
        yield f"{at}: the model takes no null"
    if exact and "propertyNames" in theirs and _bounds_of_names(ours) != _bounds_of_names(theirs):
        yield f"{at}: the names of members have other bounds"
    if exact and "default" in theirs and ours.get("default") != theirs["default"]:
        yield f"{at}: the defaults differ"


def _have_schemas(ours: Node, theirs: Node, key: str) -> bool:
    return isinstance(ours.get(key), dict) and isinstance(theirs.get(key), dict)


def _bounds_of_names(node: Node) -> Node:
    return {key: value for key, value in node["propertyNames"].items() if key in BOUNDS}


def _members(ours: Node, theirs: Node, exact: bool, at: str) -> Iterator[str]:
    if "properties" not in theirs:
        return
    documented, modelled = ours["properties"], theirs["properties"]
    if documented.keys() != modelled.keys():
        yield f"{at}: {sorted(documented.keys() ^ modelled.keys())} on one side only"
    required, needed = set(ours.get("required", [])), set(theirs.get("required", []))
    if needed - required or (exact and required != needed):
        yield f"{at}: {sorted(required ^ needed)} are required on one side only"
    for name in documented.keys() & modelled.keys():
        yield from _differences(documented[name], modelled[name], exact, f"{at}.{name}")


def _normal(schema: Node) -> Node:
    """One notation: `nullable`, integers with inclusive bounds, `enum` for `const`."""
    node = _without_null(schema)
    for exclusive, (inclusive, step) in EXCLUSIVE.items():
        if exclusive in node and node.get("type") == "integer":
            node[inclusive] = node.pop(exclusive) + step
    if len(patterns := node.get("patternProperties", {})) == 1:
        [(pattern, node["additionalProperties"])] = patterns.items()
        node["propertyNames"] = {"pattern": pattern}
    if "const" in node:
        node["enum"] = [node.pop("const")]
    if "enum" in node:
        node["enum"] = sorted(node["enum"])
        node["type"] = "string"
    if node.get("default", []) in ([], None) or isinstance(node.get("default"), dict):
        node.pop("default", None)
    return node


def _without_null(schema: Node) -> Node:
    node = dict(schema)
    for key in ("anyOf", "oneOf"):
        parts = [part for part in node.get(key, []) if part != {"type": "null"}]
        if len(parts) == 1:
            del node[key]
            return {**node, **_without_null(parts[0]), "nullable": True}
    if isinstance(node.get("type"), list):
        [kind] = (kind for kind in node["type"] if kind != "null")
        return {**node, "type": kind, "nullable": True}
    return {"nullable": False, **node}

"""Generator of the HTTP API reference, from openapi.yaml."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from scripts.reference.types import constraints, type_text

FILE = Path(__file__).parents[2] / "openapi.yaml"
TITLES = {"kv": "Prompt KV", "health": "Health and documents"}
LINE = 96
METHODS = ("get", "head", "put", "post", "delete")
Node = dict[str, Any]


def route_lines() -> Iterator[str]:
    yield "| route | role | purpose |"
    yield "|---|---|---|"
    for method, path, node in _operations():
        link = f"[`{method} {path}`](#{node['operationId']})"
        yield f"| {link} | {_role(node)} | {_text(node['summary'])} |"


def operation_lines() -> Iterator[str]:
    for tag in _document()["tags"]:
        title = TITLES.get(tag["name"], tag["name"].capitalize())
        yield from (f"## {title}", "", tag["description"], "")
        for method, path, node in _operations():
            if tag["name"] in node["tags"]:
                yield from _operation(method, path, node)


def schema_lines() -> Iterator[str]:
    for name, schema in _document()["components"]["schemas"].items():
        yield from (f"### `{name}` {{ #{name.lower()} }}", "")
        yield from (schema.get("description", "").strip(), "")
        if "properties" in schema:
            yield from _fields(schema)
        else:
            yield from (", ".join([_type(schema), *constraints(schema)]), "")


def schema_names() -> set[str]:
    return set(_document()["components"]["schemas"])


@cache
def _document() -> Node:
    document: Node = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return document


def _operations() -> Iterator[tuple[str, str, Node]]:
    for path, item in _document()["paths"].items():
        for method in METHODS:
            if method in item:
                parameters = [*item.get("parameters", ()), *item[method].get("parameters", ())]
                yield method.upper(), path, {**item[method], "parameters": parameters}


def _operation(method: str, path: str, node: Node) -> Iterator[str]:
    yield from (f"### `{method} {path}` {{ #{node['operationId']} }}", "")
    yield from (f"{_text(node['summary'])} Key: {_key(node)}.", "")
    yield from (node.get("description", "").strip(), "")
    yield from _parameters([_resolved(each) for each in node["parameters"]])
    if "requestBody" in node:
        yield from _body("Request", _resolved(node["requestBody"]))
    yield from _answers(node["responses"])


def _role(node: Node) -> str:
    required = node.get("security", _document()["security"])
    if not required:
        return "no key"
    roles = next(iter(required[0].values()))
    return ", ".join(f"`{role}`" for role in roles) or "any key"


def _key(node: Node) -> str:
    role = _role(node)
    return {"no key": "not needed", "any key": "with any role"}.get(role, f"with the role {role}")


def _parameters(parameters: list[Node]) -> Iterator[str]:
    if parameters:
        yield "| parameter | in | type | meaning |"
        yield "|---|---|---|---|"
    for each in parameters:
        kind = ", ".join([_type(each["schema"]), *constraints(each["schema"])])
        yield f"| `{each['name']}` | {each['in']} | {kind} | {_text(each.get('description', ''))} |"
    yield ""


def _body(title: str, node: Node) -> Iterator[str]:
    for media_type, content in node["content"].items():
        schema = f": {_type(content['schema'])}" if "schema" in content else ""
        yield from (f"**{title}** `{media_type}`{schema}", "")
        yield from _example(content)


def _example(content: Node) -> Iterator[str]:
    if "example" in content:
        yield from ("```json", _json(content["example"]), "```", "")


def _json(value: object, indent: str = "") -> str:
    """JSON text in which a list or object is on one line if it fits."""
    text = json.dumps(value)
    if len(indent + text) <= LINE or not isinstance(value, list | dict):
        return text
    inner = indent + "  "
    if isinstance(value, list):
        begin, end, parts = "[", "]", [_json(each, inner) for each in value]
    else:
        members = value.items()
        begin, end = "{", "}"
        parts = [f"{json.dumps(name)}: {_json(each, inner)}" for name, each in members]
    return f"{begin}\n{inner}" + f",\n{inner}".join(parts) + f"\n{indent}{end}"


def _answers(responses: Node) -> Iterator[str]:
    for status, reference in responses.items():
        if status < "300":
            yield from _success(status, _resolved(reference))
    failures = [status for status in responses if status >= "400"]
    yield from (f"**Errors** {', '.join(failures)}: a [problem document](errors.md).", "")
    if "307" in responses:
        yield from ("**307** Another replica has the resource; see [redirects](#redirects).", "")


def _success(status: str, node: Node) -> Iterator[str]:
    contents = node.get("content", {})
    kinds = ", ".join(
        f"`{media_type}`" + (f": {_type(content['schema'])}" if "schema" in content else "")
        for media_type, content in contents.items()
    )
    yield from (" ".join([f"**{status}**", _text(node["description"]), kinds]).strip(), "")
    for content in contents.values():
        yield from _example(content)


def _fields(schema: Node) -> Iterator[str]:
    yield "| field | type | default | meaning |"
    yield "|---|---|---|---|"
    for name, field in schema["properties"].items():
        kind = ", ".join([_type(field), *constraints(field)])
        text = _text(field.get("description", ""))
        yield f"| `{name}` | {kind} | {_default(schema, name, field)} | {text} |"
    yield ""


def _default(schema: Node, name: str, field: Node) -> str:
    if "default" in field:
        return f"`{json.dumps(field['default'])}`"
    return "required" if name in schema.get("required", ()) else "-"


def _type(schema: Node) -> str:
    names = _document()["components"]["schemas"]
    return type_text(schema, {name: f"#{name.lower()}" for name in names})


def _text(text: str) -> str:
    """Text on one line, for a table cell."""
    return " ".join(text.split()).replace("|", "\\|")


def _resolved(node: Node) -> Node:
    if "$ref" not in node:
        return node
    target: Any = _document()
    for step in node["$ref"].removeprefix("#/").split("/"):
        target = target[step]
    return _resolved(target)

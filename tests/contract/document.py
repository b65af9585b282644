"""openapi.yaml with all references resolved."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

METHODS = ("get", "put", "post", "delete", "head", "options", "patch", "trace")
Node = dict[str, Any]


@dataclass(frozen=True)
class Operation:
    """One method of one path. The path's own parameters are included."""

    method: str
    path: str
    node: Node

    @property
    def responses(self) -> dict[str, Node]:
        responses: dict[str, Node] = self.node["responses"]
        return responses

    def media_types(self, status: str) -> set[str]:
        return set(self.responses[status].get("content", {}))

    def matches(self, path: str) -> bool:
        pattern = re.sub(r"\\{\w+\\}", "[^/]+", re.escape(self.path))
        return re.fullmatch(pattern, path) is not None


@cache
def document() -> Node:
    written = yaml.safe_load((Path(__file__).parents[2] / "openapi.yaml").read_text())
    whole = resolved(written, written)
    assert isinstance(whole, dict)
    return whole


@cache
def schemas() -> dict[str, Node]:
    found: dict[str, Node] = document()["components"]["schemas"]
    return found


@cache
def operations() -> tuple[Operation, ...]:
    return tuple(_operations())


def _operations() -> Iterator[Operation]:
    for path, item in document()["paths"].items():
        shared = item.get("parameters", [])
        for method in METHODS:
            if method in item:
                node = item[method]
                node["parameters"] = [*shared, *node.get("parameters", [])]
                yield Operation(method.upper(), path, node)


def resolved(node: object, root: Node) -> object:
    if isinstance(node, list):
        return [resolved(part, root) for part in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return resolved(_target(node["$ref"], root), root)
    return {key: resolved(part, root) for key, part in node.items()}


def _target(reference: str, root: Node) -> object:
    target: Any = root
    for step in reference.removeprefix("#/").split("/"):
        target = target[step]
    return target

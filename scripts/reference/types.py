"""Types and constraints of JSON Schema as text."""

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]
NAMES = {"boolean": "true or false", "object": "object"}
BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "greater than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
    "multipleOf": "a multiple of {}",
    "minItems": "at least {} elements",
    "maxItems": "at most {} elements",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "pattern": "matches `{}`",
}
# A string of at least one character, and bounds of 64-bit integers: they tell a reader nothing.
TRIVIAL = {("minLength", 1), ("maximum", 2**53 - 1)}


def type_text(schema: Schema, links: Mapping[str, str]) -> str:
    """The type without its constraints. `links`: address of each named schema."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[`{name}`]({links[name]})"
    if "const" in schema:
        return f"`{_json(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{_json(value)}`" for value in schema["enum"])
    if branches := _branches(schema):
        write = bounded_type if len(_bounded(branches)) > 1 else type_text
        return " or ".join(dict.fromkeys(write(branch, links) for branch in branches))
    return _plain(schema, links)


def bounded_type(schema: Schema, links: Mapping[str, str]) -> str:
    """The type with its constraints in parentheses, as a part of another type."""
    bounds = ", ".join(constraints(schema))
    return type_text(schema, links) + (f" ({bounds})" if bounds else "")


def _plain(schema: Schema, links: Mapping[str, str]) -> str:
    kind = schema.get("type", "any value")
    if isinstance(kind, list):
        return " or ".join(_plain({**schema, "type": each}, links) for each in kind)
    if kind == "array":
        items = schema.get("items", {})
        return f"list of {bounded_type(items, links)}" if items else "list"
    if kind == "string" and schema.get("format") == "path":
        return "path"
    return NAMES.get(kind, str(kind))


def constraints(schema: Schema) -> list[str]:
    """Constraints of a schema, or of its only branch that has any."""
    found = [
        text.format(_escaped(schema[key])).replace(" 1 elements", " 1 element")
        for key, text in BOUNDS.items()
        if key in schema and (key, schema[key]) not in TRIVIAL
    ]
    bounded = _bounded(_branches(schema))
    return found + (constraints(bounded[0]) if len(bounded) == 1 else [])


def _branches(schema: Schema) -> list[Schema]:
    return [*schema.get("anyOf", ()), *schema.get("oneOf", ())]


def _bounded(branches: list[Schema]) -> list[Schema]:
    return [branch for branch in branches if constraints(branch)]


def _escaped(value: object) -> str:
    """The value inside a table cell."""
    return str(value).replace("|", "\\|")


def _json(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

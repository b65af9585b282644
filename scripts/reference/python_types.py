"""Generator of the client's exceptions and wire types, from the names that `coppice` exports."""

import inspect
from collections.abc import Iterator

from pydantic import BaseModel

import coppice
from coppice.errors import CoppiceError
from scripts.reference.http_api import schema_names

INDENT = "&emsp;"


def exception_lines() -> Iterator[str]:
    yield "| exception | meaning |"
    yield "|---|---|"
    yield from _exceptions(CoppiceError, 0)


def _exceptions(kind: type[CoppiceError], depth: int) -> Iterator[str]:
    yield f"| {INDENT * depth}`{kind.__name__}` | {_meaning(kind)} |"
    for child in sorted(kind.__subclasses__(), key=lambda each: each.__name__):
        if child.__name__ in coppice.__all__:
            yield from _exceptions(child, depth + 1)


def type_lines() -> Iterator[str]:
    schemas = schema_names()
    yield "| type | meaning |"
    yield "|---|---|"
    for name in coppice.__all__:
        kind = getattr(coppice, name)
        if name in schemas and inspect.isclass(kind) and issubclass(kind, BaseModel):
            yield f"| [`{name}`](http-api.md#{name.lower()}) | {_meaning(kind)} |"


def _meaning(kind: type) -> str:
    """The first paragraph of the class's own docstring, on one line."""
    text = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0]
    return " ".join(text.split()).replace("|", "\\|")

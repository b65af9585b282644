"""Generator of the settings: each field with type, default, names in all sources, and advice."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from engine.settings import EngineSettings, default_cache_directory
from scripts.reference.types import constraints, type_text
from service.config.settings import Settings, settings_fields
from service.config.sources import SHORT_FLAGS, flag_name, variable_name

ROOT = Path(__file__).parents[2]
UNITS = {
    "bytes_per_second": "bytes per second",
    "seconds": "seconds",
    "bytes": "bytes",
    "tokens": "tokens",
}
ADVICE = re.compile(r"(increase|reduce|set|leave|change|enable|disable|prefer|required|needed)\b")
NAME = re.compile("|".join(re.escape(f"{s}.{n}") + r"\b" for s, n, _ in settings_fields()))
VALUE = re.compile(r"([\w.*]+): ")


def lines() -> Iterator[str]:
    for section, info in Settings.model_fields.items():
        model = info.annotation
        assert isinstance(model, type) and issubclass(model, BaseModel)
        schema = model.model_json_schema()["properties"]
        yield from (f"## `{section}`", "", (model.__doc__ or "").partition("\n\n")[0], "")
        for name, field in _own_first(model):
            yield from _field(section, name, field, schema[name])


def _own_first(model: type[BaseModel]) -> list[tuple[str, FieldInfo]]:
    """Fields of a section, those that it inherits last."""
    own = vars(model)["__annotations__"]
    return sorted(model.model_fields.items(), key=lambda item: item[0] not in own)


def _field(section: str, name: str, field: FieldInfo, schema: dict[str, Any]) -> Iterator[str]:
    path = f"{section}.{name}"
    short = [f"--{SHORT_FLAGS[path]}"] if path in SHORT_FLAGS else []
    names = [flag_name(section, name), *short]
    yield from (f"### `{path}` {{ #{path} }}", "")
    yield from _description(field.description or "")
    yield "| Type | Default | Command line | Environment |"
    yield "|---|---|---|---|"
    options = " or ".join(f"`{option}`" for option in names)
    default = _default(name, field)
    kind = _type(name, schema)
    yield f"| {kind} | {default} | {options} | `{variable_name(section, name)}` |"
    yield ""


def advice(description: str) -> list[str]:
    """Parts of a description that say when to change the setting."""
    return [part for part in description.split("; ") if ADVICE.match(part)]


def _description(description: str) -> Iterator[str]:
    """Text, a list of the special values, and the advice."""
    text: list[str] = []
    values: list[str] = []
    for part in description.split("; "):
        if ADVICE.match(part):
            continue
        if VALUE.match(part):
            values.append(VALUE.sub(r"`\1`: ", part, count=1))
        elif values:
            values[-1] += f"; {part}"
        else:
            text.append(part)
    yield from (_sentence("; ".join(text)), "")
    yield from (f"- {_linked(value)}" for value in values)
    yield ""
    yield from (" ".join(map(_sentence, advice(description))), "")


def _sentence(text: str) -> str:
    first = text if text.startswith("vLLM") else text[:1].upper() + text[1:]
    return _linked(first + ".")


def _linked(text: str) -> str:
    """The text with links to the settings that it names."""
    return NAME.sub(lambda found: f"[`{found[0]}`](#{found[0]})", text)


def _type(name: str, schema: dict[str, Any]) -> str:
    unit = next((text for suffix, text in UNITS.items() if name.endswith(suffix)), None)
    kind = type_text(schema, {}).replace("null", "none")
    kind = f"{kind}, in {unit}" if unit else kind
    return ", ".join([kind, *constraints(schema)])


def _default(name: str, field: FieldInfo) -> str:
    text = default_text(field).replace(str(default_cache_directory()), "~/.cache/coppice")
    if text == EngineSettings().model and name == "model":
        return f"`{Path(text).relative_to(ROOT)}`, the bundled model"
    binary = _binary(text) if name.endswith("bytes") else None
    return f"`{text}` ({binary})" if binary else f"`{text}`"


def default_text(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, tuple):
        return ":".join(map(str, value)) or "none"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _binary(text: str) -> str | None:
    """Size in the largest binary unit that divides it."""
    if not text.isdecimal() or int(text) < 1024:
        return None
    size, names = int(text), ["bytes", "KiB", "MiB", "GiB"]
    while size % 1024 == 0 and len(names) > 1:
        size, names = size // 1024, names[1:]
    return f"{size} {names[0]}"

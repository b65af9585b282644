"""Loading of settings from flags, COPPICE_<SECTION>__<FIELD> variables and a YAML file.

Flags take precedence over variables, variables over the file, the file over defaults. A source
holds unparsed values by section and field; the settings tree validates them.
"""

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from engine.vllm_settings import parse_map
from service.config.settings import Settings, settings_fields

MERGED_MAPS = frozenset(("vllm_args",))
"""Settings that are maps whose keys may come from several sources."""
PREFIX = "COPPICE_"
DELIMITER = "__"


class SettingsError(Exception):
    """Raised for invalid settings; `lines` holds one message per error."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Settings from flags, environment variables or a file, not validated yet.

    `field_name` returns the name that a setting has in this source, for error messages.
    """

    values: Mapping[str, Any]
    field_name: Callable[[str, str], str]

    def name_of(self, section: str, field: str) -> str | None:
        values = self.values.get(section)
        named = isinstance(values, dict) and field in values
        return self.field_name(section, field) if named else None

    def name_of_section(self, section: str) -> str | None:
        if section not in self.values:
            return None
        values = self.values[section]
        return self.field_name(section, next(iter(values), "") if isinstance(values, dict) else "")


def flag_name(section: str, field: str) -> str:
    return f"--{section}.{field}".replace("_", "-")


def variable_name(section: str, field: str) -> str:
    return f"{PREFIX}{section}{DELIMITER}{field}".upper()


def from_flags(flags: Mapping[str, str]) -> Source:
    """Settings from command-line flags, given by dotted path (`engine.block_size`)."""
    return Source(values=_nest(flags, "."), field_name=flag_name)


def from_environment(environ: Mapping[str, str]) -> Source:
    """Settings from environment variables named COPPICE_<SECTION>__<FIELD>.

    Names without the delimiter are ignored: Kubernetes sets COPPICE_PORT for a Service named
    coppice.
    """
    variables = {
        name.removeprefix(PREFIX).lower(): text
        for name, text in environ.items()
        if name.startswith(PREFIX) and DELIMITER in name
    }
    return Source(values=_nest(variables, DELIMITER), field_name=variable_name)


def from_file(file: Path) -> Source:
    tree = read_yaml(file)
    if not isinstance(tree, dict | None):
        raise SettingsError(f"{file}: must be a mapping of sections, such as 'server:'")
    sections = {str(name): values for name, values in (tree or {}).items() if values is not None}
    return Source(values=sections, field_name=lambda *_: str(file))


def merge(sources: Sequence[Source]) -> dict[str, Any]:
    """Merge settings from several sources; the first source that has a field wins."""
    tree: dict[str, Any] = {}
    for source in reversed(sources):
        for section, values in source.values.items():
            existing = tree.get(section)
            if isinstance(values, dict) and isinstance(existing, dict):
                values = {**existing, **values, **_merged_maps(existing, values)}
            tree[section] = values
    return tree


def _merged_maps(lower: Mapping[str, Any], higher: Mapping[str, Any]) -> dict[str, Any]:
    """The map fields that both sources of a section have, merged by key."""
    pairs = {name: (lower.get(name), higher.get(name)) for name in MERGED_MAPS}
    return {
        name: {**below, **above}
        for name, (below, above) in pairs.items()
        if isinstance(below, dict) and isinstance(above, dict)
    }


def _nest(values: Mapping[str, str], delimiter: str) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, text in sorted(values.items()):  # a map as a whole before its single keys
        section, _, field = path.partition(delimiter)
        value = None if text == "none" else text
        name, _, key = field.partition(delimiter)
        if name not in MERGED_MAPS:
            tree.setdefault(section, {})[field] = value
        elif key:
            keys = tree.setdefault(section, {}).get(name)
            tree[section][name] = {**(keys if isinstance(keys, dict) else {}), key: value}
        else:
            tree.setdefault(section, {})[name] = value if value is None else _parse_mapping(value)
    return tree


def _parse_mapping(text: str) -> object:
    """The mapping that a text holds, or the text, whose error validation reports."""
    try:
        value = parse_map(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def read_yaml(file: Path) -> object:
    """Parse a YAML file. Errors give the line number, not the text, which may hold a secret."""
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise SettingsError(f"{file}: line {line}: {error.problem}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise SettingsError(f"{file}: not valid YAML") from None


def load_settings(
    *,
    flags: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Settings:
    """Load and validate the settings; raises SettingsError.

    `flags`: values by dotted path (`engine.block_size`).
    """
    sources = [
        from_flags(flags or {}),
        from_environment(os.environ if environ is None else environ),
    ]
    if file is not None:
        sources.append(from_file(file))
    try:
        return Settings.model_validate(merge(sources))
    except ValidationError as error:
        raise SettingsError(*(_error_line(detail, sources) for detail in error.errors())) from None


def _error_line(detail: ErrorDetails, sources: Sequence[Source]) -> str:
    """One-line message for an invalid setting, without the value, which may be a secret."""
    path = [str(part) for part in detail["loc"]]
    text = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        text = "there is no such setting" + _suggestion(path)
    origin = _origin(path, sources)
    return f"{'.'.join(path)}: {text}" + (f" (from {origin})" if origin else "")


def _suggestion(path: Sequence[str]) -> str:
    known = [f"{section}.{name}" for section, name, _ in settings_fields()]
    close = difflib.get_close_matches(".".join(path), known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _origin(path: Sequence[str], sources: Sequence[Source]) -> str | None:
    """Flag, environment variable or file that an invalid setting comes from, for the message.

    None for a known section as a whole, because several sources may contribute to it.
    """
    section, *rest = path
    if rest:
        names = (source.name_of(section, rest[0]) for source in sources)
    else:
        names = (
            source.name_of_section(section)
            for source in sources
            if _is_sole_source(section, source)
        )
    return next(filter(None, names), None)


def _is_sole_source(section: str, source: Source) -> bool:
    """True if only this source can have caused an error about a whole settings section."""
    return section not in Settings.model_fields or not isinstance(source.values.get(section), dict)

"""Loader of the settings: flags, environment variables and a YAML file, in this precedence.

Flags take precedence over variables, variables over the file, the file over defaults.
"""

import difflib
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings.sources.utils import parse_env_vars

from service.config.settings import Settings, settings_fields

PREFIX = "COPPICE_"
DELIMITER = "__"
NONE = "none"
"""Text of a flag or variable that clears the setting."""
SHORT_FLAGS = {"server.host": "host", "server.port": "port", "engine.model": "model"}


class _Sources(Settings, BaseSettings):
    """The settings with the names that they have on the command line and in the environment.

    Values stay text: the settings parse and validate them.
    """

    model_config = SettingsConfigDict(
        enable_decoding=False,
        env_prefix=PREFIX,
        env_nested_delimiter=DELIMITER,
        env_parse_none_str=NONE,
        cli_parse_none_str=NONE,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_kebab_case=True,
        cli_shortcuts=SHORT_FLAGS,
        cli_use_class_docs_for_groups=True,
    )


class SettingsError(Exception):
    """Raised for invalid settings; `lines` holds one message per error."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


class SettingsFlags:
    """Flags of a command: `--config` and one for each setting."""

    def __init__(self) -> None:
        self.parser = ArgumentParser(add_help=False, allow_abbrev=False)
        self.parser.add_argument(
            "--config", type=Path, metavar="PATH", help="YAML file with settings"
        )
        self._source = CliSettingsSource[ArgumentParser](_Sources, root_parser=self.parser)

    def values(self, parsed: Namespace) -> dict[str, Any]:
        """Texts of the flags that were given, by section and field."""
        return self._source(parsed_args=parsed)()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Settings from flags, environment variables or a file, not validated yet.

    `field_name` returns the name that a setting has in this source, for error messages.
    """

    values: Mapping[str, Any]
    field_name: Callable[[str, str], str]

    def name_of(self, section: str, field: str) -> str | None:
        values = self.values.get(section)
        named = isinstance(values, dict) and field in values
        return self.field_name(section, field) if named else None


def flag_name(section: str, field: str) -> str:
    return f"--{section}.{field}".replace("_", "-")


def variable_name(section: str, field: str) -> str:
    return f"{PREFIX}{section}{DELIMITER}{field}".upper()


def load_settings(
    *,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Settings:
    """Load and validate the settings; raises SettingsError.

    `flags`: values by section and field.
    """
    sources = [
        _Source(values=flags or {}, field_name=flag_name),
        _from_environment(os.environ if environ is None else environ),
    ]
    if file is not None:
        sources.append(_from_file(file))
    try:
        return Settings.model_validate(_merge(sources))
    except ValidationError as error:
        raise SettingsError(*(_error_line(detail, sources) for detail in error.errors())) from None


def _from_environment(environ: Mapping[str, str]) -> _Source:
    """Settings from environment variables, also those of unknown names with the delimiter.

    Names without the delimiter are ignored: Kubernetes sets COPPICE_PORT for a Service named
    coppice.
    """
    named = {
        name: text
        for name, text in environ.items()
        if name.startswith(PREFIX) and DELIMITER in name
    }
    source = EnvSettingsSource(_Sources)
    source.env_vars = parse_env_vars(named, parse_none_str=NONE)
    sections = (name.removeprefix(PREFIX).lower().partition(DELIMITER) for name in named)
    unknown = {
        section: {field: None}
        for section, _, field in sections
        if section not in Settings.model_fields
    }
    return _Source(values={**source(), **unknown}, field_name=variable_name)


def _from_file(file: Path) -> _Source:
    tree = read_yaml(file)
    if not isinstance(tree, dict | None):
        raise SettingsError(f"{file}: must be a mapping of sections, such as 'server:'")
    sections = {str(name): values for name, values in (tree or {}).items() if values is not None}
    return _Source(values=sections, field_name=lambda *_: str(file))


def _merge(sources: Sequence[_Source]) -> dict[str, Any]:
    """Settings of all sources; the first source that has a field wins."""
    tree: dict[str, Any] = {}
    for source in reversed(sources):
        for section, values in source.values.items():
            lower = tree.get(section)
            if isinstance(lower, dict) and isinstance(values, dict):
                values = {**lower, **values}
            tree[section] = values
    return tree


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


def _error_line(detail: ErrorDetails, sources: Sequence[_Source]) -> str:
    """One-line message for an invalid setting, without the value, which may be a secret."""
    path = [str(part) for part in detail["loc"]]
    text = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        text = "there is no such setting" + suggestion(".".join(path))
    origin = _origin(path, sources)
    return f"{'.'.join(path)}: {text}" + (f" (from {origin})" if origin else "")


def suggestion(name: str) -> str:
    """The setting that an unknown name, or an unknown flag, probably means, for an error."""
    flag = name.startswith("-")
    known = [
        flag_name(section, field) if flag else f"{section}.{field}"
        for section, field, _ in settings_fields()
    ]
    close = difflib.get_close_matches(name.partition("=")[0], known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _origin(path: Sequence[str], sources: Sequence[_Source]) -> str | None:
    """Flag, environment variable or file that an invalid setting comes from, for the message.

    None for a known section as a whole, because several sources may contribute to it.
    """
    section, *rest = path
    if rest:
        names = (source.name_of(section, rest[0]) for source in sources)
        return next(filter(None, names), None)
    for source in sources:
        values = source.values.get(section)
        fields = list(values) if isinstance(values, dict) else [""]
        if values is not None and not (section in Settings.model_fields and fields != [""]):
            return source.field_name(section, fields[0] if fields else "").rstrip("._")
    return None

"""Command-line flags, generated from the fields of the settings tree.

A flag's text is passed to the settings unchanged; only the settings parse and validate it.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from service.config.settings import settings_fields
from service.config.sources import MERGED_MAPS, flag_name

SHORT_FLAGS = {"server.host": "--host", "server.port": "--port", "engine.model": "--model"}


MAP_FLAGS = tuple(
    (flag_name(section, name) + ".", f"{section}.{name}.")
    for section, name, _ in settings_fields()
    if name in MERGED_MAPS
)
"""Prefixes of the flags for single keys of a map, and of the settings' paths."""
SINGLE_KEYS = "coppice.single_keys"


class SettingsCommand(TyperCommand):
    """Command with a flag for each setting, and for any key of a setting that is a map."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        taken: dict[str, str] = {}
        ctx.meta[SINGLE_KEYS] = taken
        rest = iter(args)
        return super().parse_args(
            ctx, [arg for arg in rest if not _take_key(ctx, arg, rest, taken)]
        )


def _take_key(
    ctx: typer.Context, argument: str, rest: Iterator[str], taken: dict[str, str]
) -> bool:
    """Store a key of a map that `argument` sets; returns true if it does."""
    for flag, path in MAP_FLAGS:
        if argument.startswith(flag):
            name, equals, text = argument.removeprefix(flag).partition("=")
            value: str | None = text if equals else next(rest, None)
            if value is None:
                ctx.fail(f"Option '{argument}' requires an argument.")
            taken[path + name.replace("-", "_")] = value
            return True
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """Command-line flag of one settings field."""

    section: str
    name: str
    description: str
    default: str

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def parameter(self) -> inspect.Parameter:
        spellings = [flag_name(self.section, self.name)]
        if self.path in SHORT_FLAGS:
            spellings.append(SHORT_FLAGS[self.path])
        option = typer.Option(
            *spellings,
            help=self.description,
            show_default=self.default,
            rich_help_panel=self.section,
            metavar="VALUE",
        )
        return _keyword(f"{self.section}__{self.name}", Annotated[str | None, option])


def settings_flags() -> list[Flag]:
    return [
        Flag(
            section=section,
            name=name,
            description=field.description or "",
            default=default_text(field),
        )
        for section, name, field in settings_fields()
    ]


def with_settings_flags(
    command: Callable[[Mapping[str, str], Path | None], None],
) -> Callable[..., None]:
    """Typer command with `--config` and a flag for each setting, which calls `command`."""
    flags = settings_flags()
    config = typer.Option("--config", help="YAML file with settings", metavar="PATH")
    parameters = [
        _keyword("config", Annotated[Path | None, config]),
        *(flag.parameter for flag in flags),
    ]

    def run(ctx: typer.Context, config: Path | None = None, **given: str | None) -> None:
        paths = {
            parameter.name: flag.path for parameter, flag in zip(parameters[1:], flags, strict=True)
        }
        named = {paths[name]: text for name, text in given.items() if text is not None}
        command({**named, **ctx.meta[SINGLE_KEYS]}, config)

    run.__doc__ = command.__doc__
    signature = [_keyword("ctx", typer.Context, inspect.Parameter.empty), *parameters]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in signature}
    cast(Any, run).__signature__ = inspect.Signature(signature)
    return run


def _keyword(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def default_text(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, tuple):
        return ":".join(map(str, value)) or "none"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)

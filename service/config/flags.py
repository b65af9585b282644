"""Command-line flags, generated from the fields of the settings tree.

A flag's text is passed to the settings unchanged; only the settings parse and validate it.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from pydantic.fields import FieldInfo

from service.config.settings import settings_fields
from service.config.sources import flag_name

SHORT_FLAGS = {"server.host": "--host", "server.port": "--port", "engine.model": "--model"}


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

    def run(config: Path | None = None, **given: str | None) -> None:
        paths = {
            parameter.name: flag.path for parameter, flag in zip(parameters[1:], flags, strict=True)
        }
        command({paths[name]: text for name, text in given.items() if text is not None}, config)

    run.__doc__ = command.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    cast(Any, run).__signature__ = inspect.Signature(parameters)
    return run


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=annotation)


def default_text(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, tuple):
        return ":".join(map(str, value)) or "none"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)

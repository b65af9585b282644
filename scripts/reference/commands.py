"""Generator of the commands of `coppice`, from the Typer application."""

from collections.abc import Iterator, Mapping
from typing import Any

from typer.main import get_command

from service.cli import build_cli
from service.config.sources import DELIMITER


def lines() -> Iterator[str]:
    yield from _group("coppice", get_command(build_cli()))


def _group(name: str, group: Any) -> Iterator[str]:
    commands: Mapping[str, Any] = group.commands
    for child, command in commands.items():
        if hasattr(command, "commands"):
            yield from _group(f"{name} {child}", command)
        else:
            yield from _command(f"{name} {child}", command)


def _command(name: str, command: Any) -> Iterator[str]:
    own = [p for p in command.params if DELIMITER not in p.name]
    with_settings = len(own) < len(command.params)
    words = [_usage(parameter) for parameter in own] + [
        "[--SECTION.FIELD VALUE ...]"
    ] * with_settings
    yield from (f"## `{name}`", "", "```text", " ".join([name, *words]), "```", "")
    yield from ((command.help or "").replace("`", "`").strip(), "")
    if own or with_settings:
        yield from ("| option | meaning |", "|---|---|")
    for parameter in own:
        yield f"| `{_spelling(parameter)}` | {_sentence(parameter.help)} |"
    if with_settings:
        yield (
            "| `--SECTION.FIELD VALUE` | Any [setting](settings.md), such as "
            "`--engine.block-size 16`. |"
        )
    yield ""


def _usage(parameter: Any) -> str:
    spelling = _spelling(parameter)
    return spelling if parameter.required else f"[{spelling}]"


def _spelling(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.name).upper()
    metavar = parameter.metavar or str(parameter.name).upper()
    return f"{parameter.opts[-1]} {metavar}"


def _sentence(text: str) -> str:
    return text.rstrip(".") + "."

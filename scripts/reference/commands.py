"""Generator of the commands of `coppice`, from its argument parser."""

from argparse import SUPPRESS, ArgumentParser, _SubParsersAction
from collections.abc import Iterator

from service.cli import build_parser


def lines() -> Iterator[str]:
    yield from _group(build_parser())


def _group(parser: ArgumentParser) -> Iterator[str]:
    [commands] = (a for a in parser._actions if isinstance(a, _SubParsersAction))
    for command in commands.choices.values():
        is_group = any(isinstance(action, _SubParsersAction) for action in command._actions)
        yield from _group(command) if is_group else _command(command)


def _command(command: ArgumentParser) -> Iterator[str]:
    usage = command.format_usage().removeprefix("usage: ").replace(" [-h]", "").strip()
    own = [
        action
        for action in command._actions
        if "." not in action.dest and action.dest != "help" and action.help != SUPPRESS
    ]
    yield from (f"## `{command.prog}`", "", "```text", usage, "```", "")
    yield from (command.description or "", "")
    if own:
        yield from ("| option | meaning |", "|---|---|")
    for action in own:
        words = [*action.option_strings[-1:], *([action.metavar] if action.metavar else [])]
        text = (action.help or "").rstrip(".")
        yield f"| `{' '.join(map(str, words))}` | {text[:1].upper()}{text[1:]}. |"
    if any("." in action.dest for action in command._actions):
        yield (
            "| `--SECTION.FIELD VALUE` | Any [setting](settings.md), such as "
            "`--engine.block-size 16`. |"
        )
    yield ""

"""Commands of `coppice`, run in the test's process."""

import contextlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

from service.cli import run
from service.config.sources import SettingsFlags
from service.serve_components import ServeComponents


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    exit_code: int
    stdout: str
    stderr: str


def run_command(
    *arguments: str,
    components: ServeComponents | None = None,
    environ: Mapping[str, str] | None = None,
) -> Result:
    """Run a command line; `environ`: variables that are added to the environment."""
    code: object = 0
    with (
        contextlib.redirect_stdout(io.StringIO()) as stdout,
        contextlib.redirect_stderr(io.StringIO()) as stderr,
        mock.patch.dict("os.environ", environ or {}),
    ):
        try:
            run(arguments, components)
        except SystemExit as exit_:
            code = exit_.code
    assert isinstance(code, int)
    return Result(exit_code=code, stdout=stdout.getvalue(), stderr=stderr.getvalue())


def parsed_flags(*arguments: str) -> dict[str, Any]:
    """Values of settings flags by section and field; raises SystemExit for an unknown flag."""
    flags = SettingsFlags()
    return flags.values(flags.parser.parse_args(arguments))

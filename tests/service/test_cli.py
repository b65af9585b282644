"""The command line, with fakes for the engine and the server."""

import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from fastapi import FastAPI

from engine.errors import EngineDead, StartFailed
from engine.protocol import Engine
from engine.types.info import EngineHealth
from service.config.settings import Settings, redacted, settings_fields
from service.config.sources import SettingsFlags, flag_name
from service.http.shutdown import ServerLifecycle
from service.secondary_node import Node
from service.serve_components import ServeComponents, with_prompt_kv
from tests.service.command_line import Result, run_command


class IdleServer:
    """Replaces the engine, which is never called, and its server."""

    def health(self) -> EngineHealth:
        return EngineHealth(stage="serving", alive=True, age_seconds=0.0)


def idle_app(title: str = "idle") -> FastAPI:
    app = FastAPI(title=title)
    app.state.server = IdleServer()
    return app


def ignore(*_: object) -> None:
    pass


PARTS = ServeComponents(
    configure_logging=ignore,
    check_engine=ignore,
    load_engine=lambda _: cast(Engine, IdleServer()),
    create_app=lambda *_: idle_app(),
    run_server=ignore,
)


def run(
    *arguments: str, components: ServeComponents = PARTS, environ: dict[str, str] | None = None
) -> Result:
    return run_command(*arguments, components=components, environ=environ)


def refuse(text: str) -> Callable[..., Any]:
    def part(*_: object) -> Any:
        raise StartFailed(text)

    return part


def test_process_exits_after_a_server_that_stopped_without_an_error() -> None:
    codes = list[int]()
    exits = replace(PARTS, exit_process=codes.append)
    assert run("serve", components=exits).exit_code == 0
    failing = replace(exits, run_server=refuse("the disk is full"))
    assert run("serve", components=failing).exit_code == 1
    assert codes == [0]


def test_exit_runs_exit_handlers_and_waits_for_no_thread() -> None:
    program = """
import atexit, threading, time
from service.serve_components import exit_process

threading.Thread(target=time.sleep, args=(600,)).start()
atexit.register(print, "exit handler")
exit_process(0)
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, timeout=60, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "exit handler\n", "")


def test_output_may_be_read_in_part() -> None:
    """Also a text that is longer than the buffer of a pipe."""
    program = "from service import cli; cli.run = lambda **_: print('x' * 200_000); cli.main()"
    piped = ["bash", "-c", 'set -o pipefail; "$0" -c "$1" | head -c 1', sys.executable, program]
    ended = subprocess.run(piped, timeout=60, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "x", "")


def test_every_field_has_one_flag() -> None:
    options = [action.option_strings[0] for action in SettingsFlags().parser._actions]
    flags = [flag_name(section, name) for section, name, _ in settings_fields()]
    assert sorted(option for option in options if "." in option) == sorted(flags)


def test_sections_have_no_flags() -> None:
    result = run("check-config", "--engine", '{"block_size": 32}')
    assert result.exit_code == 2
    assert result.stderr.endswith("(from --engine)\n")


def test_check_config_prints_the_resolved_settings() -> None:
    result = run("check-config", "--port", "9", "--engine.block-size", "64")
    assert result.exit_code == 0
    tree = yaml.safe_load(result.stdout)
    assert tree["server"]["port"] == 9
    assert tree["engine"]["block_size"] == 64
    assert tree["limits"] == redacted(Settings())["limits"]


def test_check_config_output_can_be_read_back(tmp_path: Path) -> None:
    file = tmp_path / "coppice.yaml"
    file.write_text(run("check-config", "--log.format", "json").stdout, encoding="utf-8")
    result = run("check-config", "--config", str(file))
    assert yaml.safe_load(result.stdout) == yaml.safe_load(file.read_text(encoding="utf-8"))


def test_environment_reaches_the_settings() -> None:
    result = run("check-config", environ={"COPPICE_LOG__LEVEL": "debug"})
    assert yaml.safe_load(result.stdout)["log"]["level"] == "debug"


@pytest.mark.parametrize("command", ["serve", "check-config"])
def test_invalid_settings_exit_with_code_2_and_a_line_each(command: str) -> None:
    result = run(command, "--port", "x", "--engine.block-size", "33")
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert [line.split(":")[1] for line in lines] == [" server.port", " engine.block_size"]
    assert all(line.startswith("coppice: ") for line in lines)


def test_unknown_flag_exits_with_code_2_and_the_nearest_name() -> None:
    result = run("serve", "--engine.blok-size=32")
    assert result.exit_code == 2
    assert "no option --engine.blok-size=32; did you mean --engine.block-size?" in result.stderr


def test_flags_are_not_abbreviated() -> None:
    assert run("check-config", "--engine.block", "32").exit_code == 2


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["graphs", "--help"]])
def test_help_is_printed(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 0 and result.stdout.startswith("usage: coppice")


def test_versions_are_printed() -> None:
    result = run("version")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()][::2] == ["coppice", "torch"]


def test_serve_wires_engine_app_and_server() -> None:
    ran = []

    def run_server(
        app: FastAPI, life: ServerLifecycle, settings: Settings, listener: socket.socket
    ) -> None:
        ran.append((app.title, life.health().stage, listener.getsockname()[1], settings.log.format))

    components = replace(PARTS, run_server=run_server, create_app=lambda *_: idle_app("it"))
    result = run("serve", "--port", "0", "--log.format", "json", components=components)
    assert result.exit_code == 0, result.stderr
    [(title, stage, port, log_format)] = ran
    assert (title, stage, log_format) == ("it", "serving", "json")
    assert port > 0


def test_serve_logs_the_settings_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        run("serve", "--port", "0")
    [settings] = [record.settings for record in caplog.records if hasattr(record, "settings")]
    assert settings["server"]["port"] == 0


@pytest.mark.parametrize("part", ["load_engine", "create_app", "run_server"])
def test_failed_start_prints_one_sentence_and_exits_with_code_1(part: str) -> None:
    components = replace(PARTS, **{part: refuse("the disk is full")})
    result = run("serve", "--port", "0", components=components)
    assert (result.exit_code, result.stderr) == (1, "coppice: the disk is full\n")


def test_measured_baseline_is_reported_with_its_directory(tmp_path: Path) -> None:
    measured: list[Settings] = []

    def measure(settings: Settings) -> int:
        measured.append(settings)
        return 5

    flags = ("--engine.cache-directory", str(tmp_path), "--engine.max-sequences", "4")
    result = run("measure-baseline", *flags, components=replace(PARTS, measure_baseline=measure))
    assert (result.exit_code, measured[0].engine.max_sequences) == (0, 4)
    assert (
        result.stdout
        == f"step times of 5 batches without speculation are in {tmp_path / 'speculation'}\n"
    )


@pytest.mark.parametrize(
    ("measure", "reason"),
    [(refuse("the disk is full"), "the disk is full"), (lambda _: 0, "no step was measured")],
)
def test_baseline_that_cannot_be_measured_exits_with_code_1(
    measure: Callable[[Settings], int], reason: str
) -> None:
    result = run("measure-baseline", components=replace(PARTS, measure_baseline=measure))
    assert result.exit_code == 1 and result.stderr.startswith(f"coppice: {reason}")


def test_port_in_use_is_reported_before_the_model_is_loaded() -> None:
    components = replace(PARTS, load_engine=refuse("too late"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("serve", "--port", str(port), components=components)
    assert result.exit_code == 1
    assert (
        result.stderr
        == f"coppice: cannot listen on 127.0.0.1 port {port}: Address already in use\n"
    )


def test_vllm_arguments_are_a_mapping() -> None:
    result = run(
        "check-config", "--engine.vllm-args", "{stream_interval: 4, quantization: fp8, x: {a: 1}}"
    )
    assert result.exit_code == 0, result.stderr
    engine = yaml.safe_load(result.stdout)["engine"]
    assert engine["vllm_args"] == {"stream_interval": 4, "x": {"a": 1}}
    assert engine["quantization"] == "fp8"


def test_check_config_refuses_what_the_engine_refuses() -> None:
    components = replace(PARTS, check_engine=refuse("vLLM has no such argument"))
    result = run("check-config", "--engine.vllm-args", "{x: 1}", components=components)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "coppice: vLLM has no such argument\n"


def test_flag_of_a_vllm_argument_requires_a_value() -> None:
    result = run("check-config", "--engine.vllm-args")
    assert result.exit_code == 2
    assert "expected one argument" in result.stderr


@pytest.mark.parametrize(
    ("given", "size", "enabled"),
    [(None, 2**30, True), (None, 2**26, False), (False, 2**30, False), (True, 2**26, True)],
)
def test_prompt_kv_is_on_where_shared_memory_has_room(
    given: bool | None, size: int, enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.kv.arena.free_bytes", lambda _: size)
    settings = Settings.model_validate({"engine": {"prompt_kv": given}})
    assert with_prompt_kv(settings).prompt_kv is enabled


def test_prompt_kv_is_on_if_its_arena_has_a_configured_size(tmp_path: Path) -> None:
    kv = {"directory": tmp_path / "missing", "capacity_bytes": 2**20}
    assert with_prompt_kv(Settings.model_validate({"kv": kv})).prompt_kv is True
    assert with_prompt_kv(Settings.model_validate({"kv": {"directory": "/no"}})).prompt_kv is False


TWO_MACHINES = ("--engine.nnodes", "2", "--engine.tensor-parallel-size", "2")


def test_machines_other_than_the_first_run_their_ranks_only() -> None:
    run_ranks: list[object] = []
    node = cast(Node, IdleServer())
    components = replace(
        PARTS,
        load_engine=refuse("machine 1 has no engine"),
        load_node=lambda _: node,
        run_node=lambda *given: run_ranks.append(given[0]),
    )
    flags = (*TWO_MACHINES, "--engine.node-rank", "1", "--port", "0")
    assert run("serve", *flags, components=components).exit_code == 0
    assert run_ranks == [node]


def test_end_of_the_engine_ends_the_process_of_another_machine() -> None:
    def end(*_: object) -> None:
        raise EngineDead("machine 0 has ended")

    components = replace(PARTS, load_node=lambda _: cast(Node, IdleServer()), run_node=end)
    flags = (*TWO_MACHINES, "--engine.node-rank", "1", "--port", "0")
    result = run("serve", *flags, components=components)
    assert (result.exit_code, result.stderr) == (1, "coppice: machine 0 has ended\n")


def test_prompt_kv_is_off_on_several_machines_unless_set() -> None:
    two = {"nnodes": 2, "tensor_parallel_size": 2}
    assert with_prompt_kv(Settings.model_validate({"engine": two})).prompt_kv is False
    ray = {"distributed_executor_backend": "ray"}
    assert with_prompt_kv(Settings.model_validate({"engine": ray})).prompt_kv is False
    forced = Settings.model_validate({"engine": two | {"prompt_kv": True}})
    assert with_prompt_kv(forced).prompt_kv is True

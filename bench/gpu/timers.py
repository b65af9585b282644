"""Timers of vLLM's and our functions in every process of an engine.

The service installs them itself, and EngineCore and the workers when they import the class of
`bench.gpu.timed_worker`. If the variable TIMERS names a folder, a thread writes the sums of each
function to TIMERS/<process>.json: calls, seconds, and seconds of processor time of the calling
thread. Their difference is time in which the thread waited, for a GPU or for another thread.
"""

import functools
import importlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import current_process
from pathlib import Path
from typing import Any, Final

VARIABLE: Final = "TIMERS"
INTERVAL_SECONDS: Final = 0.5
WORKER: Final = "bench.gpu.timed_worker.TimedWorker"

IN_CORE: Final = (
    "vllm.v1.core.sched.scheduler:Scheduler.schedule",
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
    "vllm.v1.engine.core:EngineCoreProc._process_engine_step",
    "vllm.v1.serial_utils:MsgpackEncoder.encode_into",
    # The worker's methods call those of either model runner and do little else.
    "vllm.v1.worker.gpu_worker:Worker.execute_model",
    "vllm.v1.worker.gpu_worker:Worker.sample_tokens",
    "engine.weights.worker_reload:load",
    "engine.weights.file_tensor:read_view",
)
IN_SERVICE: Final = (
    "vllm.v1.serial_utils:MsgpackDecoder.decode",
    "vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
)


@dataclass(slots=True)
class Sums:
    """Sums of one function's calls. Threads may call it at the same time."""

    calls: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, seconds: float, cpu_seconds: float) -> None:
        with self._lock:
            self.calls += 1
            self.seconds += seconds
            self.cpu_seconds += cpu_seconds

    def to_dict(self) -> dict[str, float]:
        with self._lock:
            return {"calls": self.calls, "seconds": self.seconds, "cpu_seconds": self.cpu_seconds}


_sums: dict[str, Sums] = {}


def install() -> None:
    """Install the timers of this process, once, if there is a folder for them."""
    folder = os.environ.get(VARIABLE)
    if not folder or _sums:
        return
    name = current_process().name
    for target in IN_CORE if name.startswith(("EngineCore", "VllmWorker")) else IN_SERVICE:
        time_calls(target, _sums)
    file = Path(folder) / f"{os.getpid()}.json"
    thread = threading.Thread(target=_write_forever, args=(file, name), daemon=True, name="timers")
    thread.start()


def time_calls(target: str, sums: dict[str, Sums]) -> None:
    """Replace a function, named MODULE:FUNCTION or MODULE:CLASS.METHOD, by one that is timed."""
    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    added = sums.setdefault(path if owners else f"{module.split('.')[-1]}.{name}", Sums())
    setattr(owner, name, _timed(getattr(owner, name), added))


def _timed(function: Callable[..., Any], sums: Sums) -> Callable[..., Any]:
    @functools.wraps(function)
    def timed(*arguments: Any, **named: Any) -> Any:
        began, cpu = time.perf_counter(), time.thread_time()
        try:
            return function(*arguments, **named)
        finally:
            sums.add(time.perf_counter() - began, time.thread_time() - cpu)

    return timed


def _write_forever(file: Path, process: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    while True:
        content = {
            "process": process,
            "written": time.monotonic(),
            "sums": {name: sums.to_dict() for name, sums in _sums.items()},
        }
        part = file.with_suffix(".part")
        part.write_text(json.dumps(content))
        part.replace(file)
        time.sleep(INTERVAL_SECONDS)


def read_sums(folder: Path, *, since: float) -> dict[str, dict[str, float]]:
    """Sums of all functions in all processes of a folder that were written after `since`.

    `since` is on the monotonic clock, which the processes share. Waits for files that are older.
    """
    found: dict[str, dict[str, float]] = {}
    for file in sorted(folder.glob("*.json")):
        for name, sums in _read_after(file, since).items():
            total = found.setdefault(name, dict.fromkeys(sums, 0))
            found[name] = {key: total[key] + value for key, value in sums.items()}
    return found


def _read_after(file: Path, since: float) -> Mapping[str, dict[str, float]]:
    end = time.monotonic() + 4 * INTERVAL_SECONDS
    while True:
        content = json.loads(file.read_text())
        # The sums of a process that has ended do not change.
        if content["written"] > since or time.monotonic() > end:
            sums: Mapping[str, dict[str, float]] = content["sums"]
            return sums
        time.sleep(INTERVAL_SECONDS / 10)


def differences(
    after: Mapping[str, Mapping[str, float]], before: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """Additions to the sums of the functions that were called."""
    nothing: Mapping[str, float] = {}
    added = {
        name: {key: value - before.get(name, nothing).get(key, 0) for key, value in sums.items()}
        for name, sums in after.items()
    }
    return {name: sums for name, sums in added.items() if sums["calls"]}

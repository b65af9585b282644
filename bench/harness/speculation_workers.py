"""Runs the arms (configurations) of the speculation benchmark in processes, in turn."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.harness.speculation_arm import GNU, Workload
from engine.launch.environment import engine_environment
from engine.settings import EngineSettings

Run = dict[str, Any]
Texts = list[list[int]]


class Arms:
    """Running arms of the speculation benchmark, by name. Variants of `ours` share its process."""

    def __init__(self, processes: "dict[str, subprocess.Popen[str]]") -> None:
        self._processes = processes

    def run(self, name: str, work: Workload, texts: Texts | None) -> Run:
        process = self._processes[process_of(name)]
        assert process.stdin
        told = {"name": name, "work": asdict(work), "texts": texts}
        process.stdin.write(json.dumps(told) + "\n")
        process.stdin.flush()
        run: Run = _read(process)
        return run


@contextmanager
def arms(names: Sequence[str], model: Path, *, cache: Path, arctic: str | None) -> Iterator[Arms]:
    """Start the processes of all arms. `ours` profiles its steps at startup, so it starts alone."""
    hosts = dict.fromkeys(process_of(name) for name in names)
    with ExitStack() as stack:
        begun: dict[str, subprocess.Popen[str]] = {}
        alone = [[host] for host in hosts if host.startswith("ours")]
        for together in (*alone, [host for host in hosts if not host.startswith("ours")]):
            new = {
                host: stack.enter_context(_process(host, model, cache, arctic)) for host in together
            }
            for process in new.values():
                _read(process)
            begun |= new
        yield Arms(begun)


def process_of(name: str) -> str:
    own = name.endswith(GNU) or name in ("off", "ngram", "suffix")
    return name if own else "ours"


def _gnu_environment(environment: dict[str, str]) -> dict[str, str]:
    """Environment variables of an engine that uses GNU's OpenMP instead of Intel's."""
    cpus = " ".join(map(str, sorted(os.sched_getaffinity(0))))
    kept = {k: v for k, v in environment.items() if k != "LD_PRELOAD" and not k.startswith("KMP_")}
    return kept | {"GOMP_CPU_AFFINITY": cpus}


@contextmanager
def _process(
    name: str, model: Path, cache: Path, arctic: str | None
) -> "Iterator[subprocess.Popen[str]]":
    with (
        tempfile.TemporaryDirectory() as temp_dir,
        engine_environment(EngineSettings(), on_cpu=True, temp_dir=Path(temp_dir)),
    ):
        paths = [arctic if name == "suffix" else None, os.environ.get("PYTHONPATH")]
        environment = os.environ | {
            "VLLM_PLUGINS": "",
            # Keep numba from starting threads in the engine's OpenMP runtime.
            "NUMBA_THREADING_LAYER": "workqueue",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        if name.endswith(GNU):
            environment = _gnu_environment(environment)
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.harness.speculation_arm", name, str(model), str(cache)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _read(process: "subprocess.Popen[str]") -> Any:
    assert process.stdout
    while not (line := process.stdout.readline()).startswith(("{", '"ready"')):
        assert line, "the arm died"
    return json.loads(line)

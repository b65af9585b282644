"""The environment that vLLM and its processes are started with: set around the spawn only.

vLLM reads much of its configuration from the environment, and its own code writes there (LD_PRELOAD
among others). All of it happens inside `engine_environment`, which puts the service's environment
back.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from engine.cudagraphs.planner import Plan
from engine.settings import AttentionSettings, EngineSettings, SpeculationSettings

ENGINE_ENV = "COPPICE_ENGINE"
ATTENTION_ENV = "COPPICE_ENGINE_ATTENTION"
SPECULATION_ENV = "COPPICE_ENGINE_SPECULATION"
GRAPHS_ENV = "COPPICE_ENGINE_GRAPHS"
_OPENMP_LIBRARY = re.compile(r"lib(g|i)?omp\d*[.-]")
NO_STEP_DEADLINE_SECONDS = 10**6
"""Effectively none. The heartbeat finds hangs; vLLM's deadline counts time in which the machine was
suspended, and ends a healthy engine of several ranks at the first step after it.
"""
NO_SPECULATION = SpeculationSettings(mode="off")


def started_by_coppice() -> bool:
    """Whether this process belongs to a Coppice engine: the plugin is inert in any other vLLM."""
    return os.environ.get(ENGINE_ENV) == "1"


def attention_settings() -> AttentionSettings:
    """In a process of the engine: what it was started with."""
    return AttentionSettings.model_validate_json(os.environ[ATTENTION_ENV])


def speculation_settings() -> SpeculationSettings:
    return SpeculationSettings.model_validate_json(os.environ[SPECULATION_ENV])


def graph_plan() -> Plan | None:
    """In a process of the engine: the CUDA graphs that it was started with, if they are planned."""
    text = os.environ.get(GRAPHS_ENV)
    return Plan.from_json(text) if text else None


@contextmanager
def engine_environment(
    settings: EngineSettings,
    *,
    attention: AttentionSettings,
    speculation: SpeculationSettings = NO_SPECULATION,
    graphs: Plan | None = None,
    on_cpu: bool,
    temp_dir: Path,
) -> Iterator[None]:
    """What vLLM starts inside inherits the engine's environment; afterwards it is gone."""
    before, affinity = dict(os.environ), os.sched_getaffinity(0)
    os.environ.update(_common_variables() | _temp_dir_variables(temp_dir))
    os.environ[ATTENTION_ENV] = attention.model_dump_json()
    os.environ[SPECULATION_ENV] = speculation.model_dump_json()
    os.environ[GRAPHS_ENV] = graphs.to_json() if graphs else ""
    if speculation.mode != "off":
        # Past the model's longest context lies only the room of drafts that are never made.
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    if on_cpu:
        os.environ.update(
            _thread_variables(settings, sorted(affinity)) | _compilation_variables(settings)
        )
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        # A second OpenMP runtime that vLLM preloads can pin the service to one processor.
        os.sched_setaffinity(0, affinity)


def _common_variables() -> dict[str, str]:
    return {
        ENGINE_ENV: "1",
        "VLLM_PLUGINS": "coppice",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_SERVER_DEV_MODE": "0",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(NO_STEP_DEADLINE_SECONDS),
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        # What vLLM and torch warn of among themselves in the processes that they start.
        "PYTHONWARNINGS": "ignore::FutureWarning",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


def _temp_dir_variables(temp_dir: Path) -> dict[str, str]:
    """What is compiled stays where it is found again."""
    compiled = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"
    return {
        "VLLM_RPC_BASE_PATH": str(temp_dir),
        "TMPDIR": str(temp_dir),
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(compiled)),
    }


def _compilation_variables(settings: EngineSettings) -> dict[str, str]:
    """Also eager, vLLM's sampler compiles a few small functions (vllm/v1/sample/ops) with the C++
    compiler at their first use. Where there is none, as in our image, they run as they are written.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    return {"TORCHDYNAMO_DISABLE": "1"} if compiler is None and settings.eager is not False else {}


def _thread_variables(settings: EngineSettings, cpus: list[int]) -> dict[str, str]:
    """Explicit threads: vLLM's own choice changes as soon as a KV connector is configured.

    They are bound where they take every processor. Two engines that take fewer would both be bound
    to the first ones, and leave the others idle.
    """
    shares = [
        _cpus_of_rank(rank, settings.threads_per_rank, cpus) for rank in range(settings.num_ranks)
    ]
    preload = _intel_openmp_library()
    threads = {"LD_PRELOAD": _preload_variable(preload)} if preload else {}
    binds = settings.num_ranks * settings.threads_per_rank >= len(cpus)
    if settings.num_ranks > 1 and binds:
        binding = "|".join(",".join(map(str, share)) for share in shares)
        return threads | {"VLLM_CPU_OMP_THREADS_BIND": binding}
    threads["OMP_NUM_THREADS"] = str(settings.threads_per_rank)
    if settings.num_ranks > 1:
        return threads | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    # One rank computes inside EngineCore, where vLLM ignores its own binding variable.
    threads["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    pinned = shares[0] if binds else []
    return threads | (_intel_openmp_variables(pinned) if preload else _gnu_openmp_variables(pinned))


def _cpus_of_rank(rank: int, num_threads: int, cpus: list[int]) -> list[int]:
    return [cpus[(rank * num_threads + thread) % len(cpus)] for thread in range(num_threads)]


def _intel_openmp_variables(pinned: list[int]) -> dict[str, str]:
    threads = {"KMP_BLOCKTIME": "5", "KMP_TPAUSE": "0"}
    if pinned:
        places = ",".join(map(str, pinned))
        threads["KMP_AFFINITY"] = f"granularity=fine,explicit,proclist=[{places}]"
    return threads


def _gnu_openmp_variables(pinned: list[int]) -> dict[str, str]:
    return {"GOMP_CPU_AFFINITY": " ".join(map(str, pinned))} if pinned else {}


def _intel_openmp_library() -> Path | None:
    try:
        files = distribution("intel-openmp").files or []
    except PackageNotFoundError:
        return None
    return next((Path(str(f.locate())).resolve() for f in files if f.name == "libiomp5.so"), None)


def _preload_variable(library: Path) -> str:
    """One OpenMP runtime a process: vLLM refuses to start with two."""
    others = os.environ.get("LD_PRELOAD", "").split(":")
    kept = [other for other in others if other and not _OPENMP_LIBRARY.match(Path(other).name)]
    return ":".join([*kept, str(library)])

"""Environment variables for vLLM's processes, set only during their start.

vLLM reads much of its configuration from the environment and also writes to it, LD_PRELOAD among
others. All of this happens inside `engine_environment`, which restores the service's environment.
"""

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import MappingProxyType

from engine.launch.ranks.multi_machine_setup import network_variables
from engine.runtime import start_phases
from engine.runtime.process_environment import (
    CACHE_ENV,
    DIGEST_ENV,
    ENGINE_ENV,
)
from engine.settings import EngineSettings

_OF_ONE_NODE = frozenset(
    ("model", "tokenizer", "seed", "node_rank", "prompt_kv", "cache_directory", "cpu_threads")
    + ("start_seconds", "step_seconds")
)
"""Engine settings in which the machines of one engine may differ. Prompt KV is off on several."""
_OF_RANKS = frozenset(
    ("PYTHONWARNINGS", "PYTHONHASHSEED", "HF_HUB_OFFLINE") + ("COPPICE_SHARED_PREFIX_ISA",)
)
_OF_ENGINE = re.compile("COPPICE_ENGINE(_[A-Z]+)*")
"""Variables of the engine's start and its features; those of settings have two underscores."""
_PREFIXES_OF_RANKS = (
    *("VLLM_", "NCCL_", "GLOO_", "UCX_", "TORCH", "PYTORCH_"),
    *("OMP_", "KMP_", "GOMP_", "MKL_"),
)
_NOT_OF_RANKS = frozenset(
    ("VLLM_HOST_IP", "VLLM_HOST_PORT", "VLLM_PORT", "VLLM_RPC_BASE_PATH", "VLLM_API_KEY")
    + ("TORCHINDUCTOR_CACHE_DIR", "VLLM_NIXL_SIDE_CHANNEL_HOST")
)
"""Variables of one machine, and credentials, that begin like variables of ranks."""
_INTERFACE_SUFFIX = "_SOCKET_IFNAME"
_OPENMP_LIBRARY = re.compile(r"lib(g|i)?omp\d*[.-]")
NO_STEP_DEADLINE_SECONDS = 10**6
"""Deadline of a vLLM step that is never reached.

The heartbeat detects hangs. vLLM's deadline counts time in which the machine was suspended, and
then stops a healthy engine with several ranks at its next step.
"""


def settings_digest(settings: EngineSettings, of_features: Mapping[str, str]) -> str:
    """Digest of the settings and features' variables that all machines of an engine must share."""
    shared = settings.model_dump_json(exclude=set(_OF_ONE_NODE))
    return hashlib.sha256(f"{shared}\n{sorted(of_features.items())}".encode()).hexdigest()


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of EngineCore that ranks need which do not inherit its environment, as with Ray."""
    return {name: value for name, value in environment.items() if _is_of_ranks(name)}


def _is_of_ranks(name: str) -> bool:
    is_of_one_machine = name in _NOT_OF_RANKS or name.endswith(_INTERFACE_SUFFIX)
    is_of_ranks = name in _OF_RANKS or _OF_ENGINE.fullmatch(name) is not None
    return is_of_ranks or (name.startswith(_PREFIXES_OF_RANKS) and not is_of_one_machine)


def rank_preload(environment: Mapping[str, str]) -> dict[str, str]:
    """LD_PRELOAD of a CPU rank: the OpenMP runtime, if it is preloaded here."""
    library = str(intel_openmp_library())
    is_preloaded = library in environment.get("LD_PRELOAD", "").split(":")
    return {"LD_PRELOAD": library} if is_preloaded else {}


def interface_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Names of network interfaces, which ranks use unless their node has names of its own."""
    return {name: value for name, value in environment.items() if name.endswith(_INTERFACE_SUFFIX)}


@contextmanager
def engine_environment(
    settings: EngineSettings,
    *,
    of_features: Mapping[str, str] = MappingProxyType({}),
    on_cpu: bool,
    temp_dir: Path,
) -> Iterator[None]:
    """Set the engine's environment for processes that vLLM starts; restore it on exit."""
    before, affinity = dict(os.environ), os.sched_getaffinity(0)
    network = network_variables(settings)
    os.environ.update(_common_variables() | network | _temp_dir_variables(temp_dir))
    os.environ.update(of_features)
    os.environ[CACHE_ENV] = str(settings.cache_directory)
    os.environ[DIGEST_ENV] = settings_digest(settings, of_features)
    if on_cpu:
        os.environ.update(
            thread_variables(settings, sorted(affinity)) | _compilation_variables(settings)
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
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_SERVER_DEV_MODE": "0",
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "1",  # engine.launch.ranks.ray_executor extends it
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(NO_STEP_DEADLINE_SECONDS),
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        # Suppress warnings of vLLM and torch about each other in the engine's processes, and of
        # multiprocessing about semaphores of killed processes, which it removes.
        "PYTHONWARNINGS": "ignore::FutureWarning,"
        "ignore::UserWarning:multiprocessing.resource_tracker",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


def _temp_dir_variables(temp_dir: Path) -> dict[str, str]:
    """Variables for temporary directories, and for a cache of compiled code that outlives them."""
    compiled = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"
    return {
        "VLLM_RPC_BASE_PATH": str(temp_dir),
        "TMPDIR": str(temp_dir),
        start_phases.FILE_ENV: str(temp_dir / start_phases.FILE_NAME),
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(compiled)),
    }


def _compilation_variables(settings: EngineSettings) -> dict[str, str]:
    """Variables that disable compilation where there is no C++ compiler, as in our image.

    Even in eager mode vLLM's sampler compiles a few small functions at their first use
    (vllm/v1/sample/ops).
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    return {"TORCHDYNAMO_DISABLE": "1"} if compiler is None and settings.eager is not False else {}


def thread_variables(settings: EngineSettings, cpus: list[int]) -> dict[str, str]:
    """Variables for thread counts and binding.

    They are explicit, because vLLM's own choice changes once a KV connector is configured.

    Threads are bound only if one engine uses every processor. Otherwise two engines would both be
    bound to the first processors and leave the others idle.
    """
    num_ranks, num_threads = settings.ranks_per_node, settings.threads_per_rank
    shares = [_cpus_of_rank(rank, num_threads, cpus) for rank in range(num_ranks)]
    preload = intel_openmp_library()
    threads = {"LD_PRELOAD": _preload_variable(preload)} if preload else {}
    uses_all_cpus = num_ranks * num_threads >= len(cpus)
    binds = settings.data_parallel_size == 1 and not settings.uses_ray and uses_all_cpus
    if settings.has_workers and binds:
        binding = "|".join(",".join(map(str, share)) for share in shares)
        return threads | {"VLLM_CPU_OMP_THREADS_BIND": binding}
    threads["OMP_NUM_THREADS"] = str(num_threads)
    if settings.has_workers:
        return threads | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    # A single rank runs inside EngineCore, where vLLM ignores its binding variable.
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


def intel_openmp_library() -> Path | None:
    try:
        files = distribution("intel-openmp").files or []
    except PackageNotFoundError:
        return None
    return next((Path(str(f.locate())).resolve() for f in files if f.name == "libiomp5.so"), None)


def _preload_variable(library: Path) -> str:
    """LD_PRELOAD with a single OpenMP runtime, because vLLM does not start with two."""
    others = os.environ.get("LD_PRELOAD", "").split(":")
    kept = [other for other in others if other and not _OPENMP_LIBRARY.match(Path(other).name)]
    return ":".join([*kept, str(library)])

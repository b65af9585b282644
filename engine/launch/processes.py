"""Start and stop of vLLM's processes, and calls to EngineCore and the workers.

With data parallelism there are several EngineCores. vLLM sends a call to all of them, but returns
only the result of the first one, so calls return a list here.

vLLM never resolves the futures of calls that are in flight when the engine dies. The task that
handles the engine's outputs does end when the engine dies or is stopped, so calls wait for it too.
"""

import asyncio
import logging
import multiprocessing
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psutil
from pydantic import ValidationError
from vllm import __version__ as vllm_version
from vllm import envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from engine.errors import EngineDead, StartFailed
from engine.features import Features
from engine.launch.arguments import USAGE_CONTEXT, engine_arguments
from engine.launch.environment import engine_environment
from engine.launch.ranks.data_parallel import check_model, install_coordinator
from engine.launch.ranks.placement import count_running_tokens
from engine.launch.vllm_seams import check_version
from engine.runtime.await_engine import await_engine
from engine.runtime.leftover_files import TempDir, remove_leftover_shared_memory
from engine.runtime.start_phases import StartPhases
from engine.sampling import support_hooks
from engine.sampling.routed_experts import accept_cpu_runner
from engine.settings import EngineSettings

log = logging.getLogger(__name__)
EXIT_SECONDS: Final = 0.5
"""Time for vLLM's processes to exit, after which they are killed. They take seconds on a busy
machine. Nothing is lost: `_shut_down` removes their files."""
KILLED_SECONDS: Final = 5.0
"""Longest wait for killed processes, which release their memory before they have ended."""
POLL_SECONDS: Final = 0.01
KILL_RETRY_SECONDS: Final = 0.5


class VllmProcesses:
    """Starts, calls and stops the EngineCores and their workers."""

    def __init__(
        self, settings: EngineSettings, features: Features, *, worker_extension: str
    ) -> None:
        self._settings = settings
        self._features = features
        self._worker_extension = worker_extension
        self._starting: asyncio.Future[None] | None = None
        self._temp_dir: TempDir | None = None
        self._llm: AsyncLLM | None = None
        self.phases = StartPhases()

    @property
    def llm(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineDead("the engine is not running")
        return self._llm

    async def start(self, model: Path) -> None:
        """Start vLLM in a thread, for seconds to minutes. If cancelled, call `abort_start`."""
        self._starting = asyncio.ensure_future(asyncio.to_thread(self._start, model))
        with self.phases.phase("starting processes"):
            await asyncio.shield(self._starting)

    def _start(self, model: Path) -> None:
        check_version(vllm_version)
        self._temp_dir = TempDir()
        self.phases.follow(self._temp_dir.path)
        if current_platform.is_cpu():
            _check_cpu(self._settings)
            accept_cpu_runner()
        if self._settings.uses_ray:
            from engine.launch.ranks.ray_executor import (
                install_ray_executor,  # needs the extra `ray`
            )

            install_ray_executor()
        with _start_failures():
            while not self._launch(model, self._temp_dir):
                pass

    def _launch(self, model: Path, temp_dir: TempDir) -> bool:
        """Create the AsyncLLM; false if its configuration has changed the settings instead."""
        on_cpu = current_platform.is_cpu()
        arguments = engine_arguments(
            self._settings,
            model,
            self._features,
            on_cpu=on_cpu,
            worker_extension=self._worker_extension,
        )
        with engine_environment(
            self._settings,
            of_features=self._features.environment(),
            on_cpu=on_cpu,
            temp_dir=temp_dir.path,
        ):
            envs.disable_envs_cache()
            config = arguments.create_engine_config(USAGE_CONTEXT)
            check_model(config)
            if not self._features.accept(config):
                return False
            log.info("engine.seed is %d", arguments.seed)
            self._create(config)
        return True

    def _create(self, config: VllmConfig) -> None:
        self._llm = _create_llm(config)

    async def call_cores(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every EngineCore between two of its steps. Raises EngineDead.

        Returns one result per data-parallel rank.
        """
        call = self.llm.engine_core.call_utility_all_async(method, *args)
        results: list[Any] = await await_engine(self.llm, call)
        return results

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker of every engine between two steps. Raises EngineDead."""
        results = await self.call_cores("collective_rpc", method, None, args, None)
        return [result for of_engine in results for result in of_engine]

    async def verify_plugin(self) -> None:
        """Check that the Coppice plugin is active; vLLM only logs if a plugin fails to load."""
        try:
            await self.call_cores("coppice_ping")
        except Exception as error:
            raise StartFailed(
                "the Coppice plugin is not active in the engine process; reinstall the package"
            ) from error

    async def set_version(self, version: str) -> None:
        """Stamp the weights version on every token sampled from now on."""
        await await_engine(self.llm, self.llm.update_weight_version(version))

    async def abort_start(self) -> None:
        """Kill vLLM's processes until the start in progress fails, as it cannot be cancelled."""
        while self._starting is not None and not self._starting.done():
            kill_processes()
            await asyncio.wait({self._starting}, timeout=KILL_RETRY_SECONDS)

    async def stop(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None and llm.output_handler is not None:
            llm.output_handler.cancel()  # or it would report the shutdown as a failure
        await asyncio.to_thread(self._shut_down, llm)

    def _shut_down(self, llm: AsyncLLM | None) -> None:
        """End vLLM's processes, and remove their files once no process maps them."""
        running = _running_processes()
        if llm is not None:
            llm.shutdown(EXIT_SECONDS)
        _wait_for_exit(running, KILLED_SECONDS)
        multiprocessing.active_children()  # reaps those that have exited
        if self._temp_dir is not None:
            self._temp_dir.close()
        remove_leftover_shared_memory()


def _check_cpu(settings: EngineSettings) -> None:
    """Refuse parallelism that vLLM does not support on CPUs, with the reason.

    Its worker allocates no tensors between two stages of a pipeline. Its kernels take the ids of
    the router for rows of their weights. With expert parallelism a rank has the rows of some
    experts only, and the kernels would read memory beyond them.
    """
    if settings.pipeline_parallel_size > 1:
        raise StartFailed(
            "vLLM's CPU worker does not support pipeline parallelism: set "
            "engine.pipeline_parallel_size to 1"
        )
    if settings.enable_expert_parallel and settings.tensor_parallel_size > 1:
        raise StartFailed(
            "vLLM's CPU kernels do not support expert parallelism: set "
            "engine.enable_expert_parallel to false; each expert is then split over the ranks"
        )


@contextmanager
def _start_failures() -> Iterator[None]:
    """Convert vLLM's exceptions to StartFailed."""
    try:
        yield
    except ValidationError as error:
        messages = "; ".join(details["msg"] for details in error.errors(include_url=False))
        raise StartFailed(f"vLLM does not accept these settings: {messages}") from error
    except (ValueError, RuntimeError, OSError) as error:
        raise StartFailed(f"vLLM did not start: {error}") from error


def _create_llm(config: VllmConfig) -> AsyncLLM:
    """Create the AsyncLLM and cache environment variables, which vLLM would read per token."""
    support_hooks.install_in_service()
    install_coordinator()
    llm = AsyncLLM.from_vllm_config(config, usage_context=USAGE_CONTEXT)
    if config.parallel_config.data_parallel_size > 1:
        count_running_tokens(llm)
    envs.enable_envs_cache()
    return llm


def engine_processes() -> dict[int, str]:
    """Pids and names of the engine's processes."""
    return {process.pid: name for process, name in _running_processes().items()}


def _running_processes() -> dict[psutil.Process, str]:
    """The engine's processes and their names, which begin with VLLM."""
    named = {}
    for child in psutil.Process(os.getpid()).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # other children may exit meanwhile
            named[child] = child.name()
    return {process: name for process, name in named.items() if name.startswith("VLLM")}


def _wait_for_exit(processes: Collection[psutil.Process], seconds: float) -> None:
    """Wait until the processes have ended. Those that multiprocessing started stay zombies."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not all(_has_exited(process) for process in processes):
        time.sleep(POLL_SECONDS)


def _has_exited(process: psutil.Process) -> bool:
    """True if all threads have ended. The first may be a zombie while others still map files."""
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1
    return True


def kill_processes() -> None:
    """Kill all processes of the engine, including those that are starting and have no name yet."""
    for child in multiprocessing.active_children():
        with suppress(psutil.NoSuchProcess):
            core = psutil.Process(child.pid)
            for process in (*core.children(recursive=True), core):
                with suppress(psutil.NoSuchProcess):
                    process.kill()

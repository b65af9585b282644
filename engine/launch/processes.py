"""Start, discovery and termination of vLLM's processes."""

import logging
import multiprocessing
import os
from contextlib import suppress
from pathlib import Path

import psutil
from pydantic import ValidationError
from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from engine.cudagraphs.planner import Plan
from engine.errors import StartFailed
from engine.launch.arguments import engine_arguments
from engine.launch.environment import engine_environment
from engine.settings import AttentionSettings, EngineSettings, SpeculationSettings

log = logging.getLogger(__name__)


def launch(
    settings: EngineSettings,
    model: Path,
    *,
    attention: AttentionSettings,
    speculation: SpeculationSettings,
    graphs: Plan | None,
    worker_extension: str,
    temp_dir: Path,
) -> AsyncLLM:
    """Start vLLM.

    Blocks for seconds to minutes, so run it in a thread to keep health probes responsive.
    """
    on_cpu = current_platform.is_cpu()
    try:
        arguments = engine_arguments(
            settings,
            model,
            speculation=speculation,
            on_cpu=on_cpu,
            graphs=graphs,
            worker_extension=worker_extension,
        )
        log.info("engine.seed is %d", arguments.seed)
        with engine_environment(
            settings,
            attention=attention,
            speculation=speculation,
            graphs=graphs,
            on_cpu=on_cpu,
            temp_dir=temp_dir,
        ):
            return _create_llm(arguments)
    except ValidationError as error:
        messages = "; ".join(details["msg"] for details in error.errors(include_url=False))
        raise StartFailed(f"vLLM refuses these settings: {messages}") from error
    except (ValueError, RuntimeError, OSError) as error:
        raise StartFailed(f"vLLM did not start: {error}") from error


def _create_llm(arguments: AsyncEngineArgs) -> AsyncLLM:
    """Create the AsyncLLM. Cache environment variables, which vLLM otherwise reads per token."""
    envs.disable_envs_cache()
    llm = AsyncLLM.from_engine_args(arguments)
    envs.enable_envs_cache()
    return llm


def engine_processes() -> dict[int, str]:
    """Pids and names of the engine's processes; vLLM gives them names that begin with VLLM."""
    named = {}
    for child in psutil.Process(os.getpid()).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # other children may exit meanwhile
            named[child.pid] = child.name()
    return {pid: name for pid, name in named.items() if name.startswith("VLLM")}


def kill_processes() -> None:
    """Kill all processes of the engine, including those that are starting and have no name yet."""
    for child in multiprocessing.active_children():
        with suppress(psutil.NoSuchProcess):
            core = psutil.Process(child.pid)
            for process in (*core.children(recursive=True), core):
                with suppress(psutil.NoSuchProcess):
                    process.kill()

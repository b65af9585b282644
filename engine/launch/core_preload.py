"""Main function of the interpreter that imports EngineCore's modules before vLLM starts EngineCore.

It reads from a pipe: a JSON object with the environment, after its length, and then the data that
multiprocessing sends to a spawned process. If the service ends first, so does the interpreter.

torch compiles a part of vLLM's sampler in the first step. It starts a process per instruction set
that the compiler might support, one after the other, and caches the result in memory. This is done
in a thread while EngineCore loads the model.
"""

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.spawn import spawn_main
from threading import Thread
from typing import Final

from setproctitle import getproctitle

from engine.runtime import gc_and_process_group

HEADER_BYTES: Final = 8
PROBE_THREAD: Final = "instruction-set-probe"


def main(modules: Sequence[str], *, tracker_fd: int, pipe_handle: int) -> None:
    gc_and_process_group.create_process_group()  # a Ctrl-C reaches only the service
    gc_and_process_group.disable_gc()  # until the plugin calls freeze_gc
    for name in modules:
        with suppress(ImportError):  # raised again where the module is used
            import_module(name)
    getproctitle()  # finds the memory of the title, which it cannot once the environment changed
    environment = read_environment(pipe_handle)
    if environment is None:
        sys.exit()
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # read again from the environment
    if compiles_in_core(environment):
        Thread(target=probe_instruction_sets, name=PROBE_THREAD, daemon=True).start()
    spawn_main(pipe_handle, tracker_fd=tracker_fd)


def compiles_in_core(environment: Mapping[str, str]) -> bool:
    """True if the sampler runs in EngineCore, as with a single rank, and is compiled."""
    is_single_rank = environment.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
    return is_single_rank and environment.get("TORCHDYNAMO_DISABLE") != "1"


def probe_instruction_sets() -> None:
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    valid_vec_isa_list()


def read_environment(pipe: int) -> dict[str, str] | None:
    """The environment for the process; None if the service has closed the pipe."""
    header = _read(pipe, HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return None
    environment: dict[str, str] = json.loads(_read(pipe, int.from_bytes(header)))
    return environment


def _read(pipe: int, num_bytes: int) -> bytes:
    """Read up to `num_bytes`, fewer at the end, without buffering the data that follow."""
    parts: list[bytes] = []
    while num_bytes and (part := os.read(pipe, num_bytes)):
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)

"""The vLLM plugin of Coppice: installs patches and hooks per process, in order.

vLLM calls `install` in the service and in every process that it starts. In a vLLM that Coppice did
not start it does nothing.
"""

import multiprocessing

from engine.attention import register as attention
from engine.launch import core_methods
from engine.launch.environment import attention_settings, speculation_settings, started_by_coppice
from engine.patches.registry import MODEL_PROCESSES, install_patches
from engine.runtime import gc_freeze, process_group
from engine.speculation import register as speculation

_installed = False


def install() -> None:
    global _installed
    if _installed or not started_by_coppice():
        return
    _installed = True
    name = multiprocessing.current_process().name
    if name.startswith("EngineCore"):
        process_group.create_process_group()
        process_group.exit_with_service()
        core_methods.install()
    install_patches(name)
    if name.startswith(MODEL_PROCESSES):
        attention.install(attention_settings())
        speculation.install(speculation_settings())
    gc_freeze.freeze_gc()

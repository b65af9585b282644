"""The one vLLM plugin of Coppice: what is installed, where, in which order.

vLLM calls `install` in every process it starts and in the service. In a vLLM that Coppice did not
start it does nothing.
"""

import multiprocessing

from engine import core_methods, heap, process
from engine.attention import installed as attention
from engine.environment import attention_settings, speculation_settings, started_by_coppice
from engine.patches.installed import WORKING_PROCESSES, install_patches
from engine.speculation import installed as speculation

_installed = False


def install() -> None:
    global _installed
    if _installed or not started_by_coppice():
        return
    _installed = True
    name = multiprocessing.current_process().name
    if name.startswith("EngineCore"):
        process.leave_service_group()
        process.die_with_service()
        core_methods.install()
    install_patches(name)
    if name.startswith(WORKING_PROCESSES):
        attention.install(attention_settings())
        speculation.install(speculation_settings())
    heap.end_imports()

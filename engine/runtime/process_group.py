"""Process group of the engine: it survives a Ctrl-C of the service, but not the service's exit.

The plugin calls this inside EngineCore before its workers start, so they inherit the group.
"""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading


def create_process_group() -> None:
    """Create a process group, so that Ctrl-C reaches only the service.

    It drains and stops the engine.
    """
    if os.getpgrp() != os.getpid():
        os.setpgrp()


def exit_with_service() -> None:
    """Kill the engine when the service dies, for which vLLM's EngineCore would wait forever."""
    threading.Thread(target=_watch_service, daemon=True, name="service-watch").start()


def _watch_service() -> None:
    service = multiprocessing.parent_process()
    assert service is not None, "EngineCore is always a child process"
    multiprocessing.connection.wait([service.sentinel])
    if os.getpgrp() == os.getpid():
        # Kill the workers too, even if they are blocked.
        os.killpg(0, signal.SIGKILL)
    os._exit(1)

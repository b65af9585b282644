"""Who dies with whom: the engine outlives a Ctrl-C meant for the service, and never the service.

Runs inside EngineCore, called by the plugin before EngineCore starts its workers, so that they
inherit the process group.
"""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading


def create_process_group() -> None:
    """A Ctrl-C reaches the service alone, which drains and then stops the engine."""
    if os.getpgrp() != os.getpid():
        os.setpgrp()


def exit_with_service() -> None:
    """vLLM's EngineCore waits for ever for a service that was killed; this ends it at once."""
    threading.Thread(target=_watch_service, daemon=True, name="service-watch").start()


def _watch_service() -> None:
    service = multiprocessing.parent_process()
    assert service is not None, "EngineCore is always a child process"
    multiprocessing.connection.wait([service.sentinel])
    if os.getpgrp() == os.getpid():
        # The workers too, whatever they are blocked in.
        os.killpg(0, signal.SIGKILL)
    os._exit(1)

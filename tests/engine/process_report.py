"""Functions that processes run in tests of how they are started. Imports nothing large."""

import os
import sys
from multiprocessing.connection import Client, Connection
from threading import enumerate as all_threads

from engine.launch.core_preload import PROBE_THREAD

MODULE = "colorsys"


def report(address: str) -> None:
    """Send the pid, the process group, a variable, and whether a module was imported."""
    with Client(address, "AF_UNIX") as connection:
        variable = os.environ.get("ADDED")
        connection.send((os.getpid(), os.getpgrp(), variable, MODULE in sys.modules))


def send_one(connection: Connection) -> None:
    connection.send(1)


def report_probe(address: str) -> None:
    """Send the pid, the number of threads that probe, and the number of cached results."""
    threads = [thread for thread in all_threads() if thread.name == PROBE_THREAD]
    for thread in threads:
        thread.join()
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    num_cached = valid_vec_isa_list.cache_info().currsize
    with Client(address, "AF_UNIX") as connection:
        connection.send((os.getpid(), len(threads), num_cached))

"""Functions that processes run in tests of how they are started. Imports nothing large."""

import os
import sys
from multiprocessing.connection import Client, Connection

MODULE = "colorsys"


def report(address: str) -> None:
    """Send the pid, the process group, a variable, and whether a module was imported."""
    with Client(address, "AF_UNIX") as connection:
        variable = os.environ.get("ADDED")
        connection.send((os.getpid(), os.getpgrp(), variable, MODULE in sys.modules))


def send_one(connection: Connection) -> None:
    connection.send(1)

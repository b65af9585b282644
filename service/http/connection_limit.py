"""Connection limit of a port, with eviction of idle connections.

An idle connection only holds a file descriptor. At the limit, the connection that has been idle
longest is closed for a new one. If none is idle, a small reserve of connections is accepted past
the limit: probes are answered on them, and other requests get a 503 with Retry-After.
"""

import resource
from collections.abc import Callable
from typing import Literal, Protocol

MAX_OPEN_FILES = 2**20
RESERVED_FILES = 256
"""File descriptors reserved for everything but connections: engine, weights, logs, Redis."""

RESERVED_CONNECTIONS = 64
"""Connections accepted past the limit, for probes and refusals."""

ShedOutcome = Literal["idle_closed", "refused", "dropped"]


class Closable(Protocol):
    def close(self) -> None: ...


class Connections:
    """Open connections of one port; at the limit, idle connections are closed for new ones.

    `limit`: the number of connections that are served. `shed` is called with the outcome for every
    connection that is closed, refused or dropped because of the limit.
    """

    def __init__(self, limit: int, *, shed: Callable[[ShedOutcome], None] = lambda _: None) -> None:
        self.limit = limit
        self._shed = shed
        self._open: set[Closable] = set()
        self._waiting: dict[Closable, None] = {}  # idle connections, longest first

    @property
    def num_open(self) -> int:
        return len(self._open)

    def add(self, connection: Closable) -> bool:
        """Add a connection, closing an idle one if necessary; False if it is past the limit."""
        if self.num_open >= self.limit:
            self._close_longest_waiting()
        self._open.add(connection)
        fits = self.num_open <= self.limit
        if fits:
            self._waiting[connection] = None
        else:
            self._shed("refused" if self.has_reserve else "dropped")
        return fits

    @property
    def has_reserve(self) -> bool:
        return self.num_open <= self.limit + RESERVED_CONNECTIONS

    def wait(self, connection: Closable) -> None:
        """Mark a connection as idle once its response is complete, so that it may be closed."""
        if connection in self._open:
            self._waiting[connection] = None

    def serve(self, connection: Closable) -> None:
        self._waiting.pop(connection, None)

    def remove(self, connection: Closable) -> None:
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def _close_longest_waiting(self) -> None:
        connection = next(iter(self._waiting), None)
        if connection is not None:
            self.remove(connection)
            connection.close()
            self._shed("idle_closed")


def connection_limit(max_connections: int) -> int:
    """Maximum number of open connections of each port (for callers and for operators).

    At most `max_connections`, and no more than the process's limit of open files allows.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return max_connections
    return max(1, min(max_connections, (soft - RESERVED_FILES) // 2))


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit.

    The soft limit is 1,024 by default, for programs that use select().
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

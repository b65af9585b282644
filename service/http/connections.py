"""The connections of one port: their bound, and those that may be closed to make room.

A connection that waits for a request costs a descriptor and serves nobody: when there are as many
as there may be, the one that has waited longest is closed for a new one. Where none waits, a few
more connections are taken, so that probes are answered and others are told to come back.
"""

import resource
from collections.abc import Callable
from typing import Literal, Protocol, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge

MAX_OPEN_FILES = 2**20
RESERVED_FILES = 256
"""Descriptors for everything that is no connection: the engine, weights, logs, Redis."""

RESERVED_CONNECTIONS = 64
"""Connections past the limit, for probes and refusals."""

ShedOutcome = Literal["idle_closed", "refused", "dropped"]


class ConnectionMetrics:
    """Of both ports."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.open = Gauge(
            "coppice_connections", "Open connections by port", ["port"], registry=registry
        )
        self.limit = Gauge(
            "coppice_connections_limit",
            "Connections of a port that are served at most",
            registry=registry,
        )
        self.shed = Counter(
            "coppice_connections_shed",
            "Connections closed or refused at the limit",
            ["outcome"],
            registry=registry,
        )
        for outcome in get_args(ShedOutcome):
            self.shed.labels(outcome)

    def update(self, callers: "Connections", operators: "Connections") -> None:
        self.open.labels("callers").set(callers.num_open)
        self.open.labels("operators").set(operators.num_open)
        self.limit.set(callers.limit)


class Closable(Protocol):
    def close(self) -> None: ...


class Connections:
    """`limit`: connections that are served; `shed` counts those that are not."""

    def __init__(self, limit: int, *, shed: Callable[[ShedOutcome], None] = lambda _: None) -> None:
        self.limit = limit
        self._shed = shed
        self._open: set[Closable] = set()
        self._waiting: dict[Closable, None] = {}  # in the order in which they began to wait

    @property
    def num_open(self) -> int:
        return len(self._open)

    def add(self, connection: Closable) -> bool:
        """False when there is no room: the connection is past the limit."""
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
        """For a request, after the response to the one before."""
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
    """Of each of two ports, and never more than the process may open files for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return max_connections
    return max(1, min(max_connections, (soft - RESERVED_FILES) // 2))


def raise_file_limit() -> None:
    """To the hard limit: the soft one is 1,024 by default, for programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

"""Limit of open files: raises it at start, and derives the maximum number of connections."""

import resource

MAX_OPEN_FILES = 2**20
RESERVED_FILES = 256
"""File descriptors reserved for everything but connections: engine, weights, logs, Redis."""


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

"""Connection to one server for prompt KV: transports, leases, and choice to fetch or recompute.

Recomputing the prompt is always possible, so failures are not raised to the caller. They are
counted, and the caller recomputes.
"""

import mmap
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from coppice.errors import CoppiceError, ProblemError
from coppice.prompt_kv.http_client import KvHttpClient
from coppice.prompt_kv.nixl import NixlReader, installed
from coppice.transport.redirects import RedirectPolicy, parse_address
from coppice.wire.prompt_kv import KvHandle, KvLayout, KvLease, KvLeaseAnswer, KvLocator

MOVING_AVERAGE_WEIGHT = 0.3
ARENA_PREFIX = "coppice-kv-"
TRANSPORTS = ("shm", "nixl", "http")
"""In order of decreasing speed."""


class BreakEven:
    """Estimates whether fetching a prompt's KV is faster than recomputing it.

    Both rates are moving averages of measurements: bytes per second of each transport, and tokens
    per second of the caller's own forward. While one of them is unknown, fetching is preferred. Not
    thread-safe: a race can only lose a measurement.
    """

    def __init__(self) -> None:
        self.bytes_per_second: dict[str, float] = {}
        self.tokens_per_second: float | None = None

    def fetched(self, transport: str, num_bytes: int, seconds: float) -> None:
        before = self.bytes_per_second.get(transport)
        self.bytes_per_second[transport] = _moving_average(before, num_bytes / max(seconds, 1e-9))

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Records how long the caller's own forward over num_tokens prompt tokens took."""
        self.tokens_per_second = _moving_average(
            self.tokens_per_second, num_tokens / max(seconds, 1e-9)
        )

    def is_worth_fetching(self, handle: KvHandle, transport: str) -> bool:
        bandwidth = self.bytes_per_second.get(transport)
        if bandwidth is None or self.tokens_per_second is None:
            return True
        return handle.num_bytes / bandwidth < handle.num_tokens / self.tokens_per_second


def _moving_average(before: float | None, latest: float) -> float:
    return latest if before is None else before + MOVING_AVERAGE_WEIGHT * (latest - before)


class SharedMemoryMap:
    """Maps the shared memory in which a server on this host keeps prompt KV; reads need no copy.

    Reading does not pin the memory, so the lease must not expire while the bytes are in use.
    Checksums verify that it did not. A server's memory (arena) is mapped once as a whole, so page
    faults occur once and not per handle. Only the latest arena is kept; memory that was handed out
    stays mapped while it is in use.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._path: str | None = None
        self._arena: memoryview | None = None

    def get_file(self, handle: KvHandle, locator: KvLocator) -> memoryview | None:
        """Read-only memory of a handle's KV; None if it belongs to another host or user."""
        if locator.path is None or locator.offset is None:
            return None
        with self._lock:
            if self._path != locator.path:
                self._path, self._arena = locator.path, _map_file(Path(locator.path))
            arena = self._arena
        end = locator.offset + handle.num_bytes
        if arena is None or end > len(arena):
            return None
        return arena[locator.offset : end]


def _map_file(path: Path) -> memoryview | None:
    if not path.name.startswith(ARENA_PREFIX):
        return None  # a server must not make the client open arbitrary files
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or not status.st_size:
            return None
        return memoryview(mmap.mmap(file, status.st_size, access=mmap.ACCESS_READ))
    finally:
        os.close(file)


class KvSource:
    """A Coppice server as a source of prompt KV; thread-safe.

    The address arguments are those of Rollouts. `transports` lists the allowed transports, the
    preferred one first; None allows all available ones. `counts` holds the number of fetches by
    transport and of failures by reason.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout: float | None = 60.0,
        transports: Sequence[str] | None = None,
        replicas: Iterable[str] = (),
    ) -> None:
        address = parse_address(base_url, api_key)
        self.endpoint = KvHttpClient(address, timeout, RedirectPolicy(address.base_url, replicas))
        self.transports = _available_transports(transports)
        self.shared_memory = SharedMemoryMap()
        self.nixl_reader = NixlReader(self.endpoint)
        self.break_even = BreakEven()
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def layout(self, handle: str, *, version: str | None = None) -> KvLayout:
        """Layout of a handle's KV. Raises KvUnavailable if its weights version is not `version`."""
        query = "" if version is None else f"?version={version}"
        return self.endpoint.request("GET", f"/v1/kv/{handle}{query}").read(KvLayout)

    def renew(self, handle: str, lease_seconds: float = 60.0) -> float:
        """Renews a handle's lease; returns the seconds left. Raises KvUnavailable if it expired."""
        body = KvLease(lease_seconds=lease_seconds).model_dump()
        reply = self.endpoint.request("POST", f"/v1/kv/{handle}/lease", body)
        return reply.read(KvLeaseAnswer).lease_seconds

    def release(self, handle: str) -> None:
        """Frees a handle's KV on the server before the lease expires; ignores expired handles."""
        self.endpoint.request("DELETE", f"/v1/kv/{handle}")

    def worth_fetching(self, handle: KvHandle) -> bool:
        """True if fetching a prompt's KV is faster than recomputing it, by measured rates."""
        offered = {locator.transport for locator in handle.locators}
        best = next((known for known in self.transports if known in offered), None)
        return best is not None and self.break_even.is_worth_fetching(handle, best)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Reports the duration of the trainer's own prefill, for worth_fetching."""
        self.break_even.computed(num_tokens, seconds)

    def count(self, reason: str) -> None:
        """Counts one prompt in `counts`, under the transport used or the reason for none."""
        with self._lock:
            self.counts[reason] += 1

    def count_failure(self, error: CoppiceError) -> None:
        """Counts one prompt in `counts`, under the code or class of the error."""
        self.count(error.code if isinstance(error, ProblemError) else type(error).__name__)

    def fetched(self, transport: str, num_bytes: int, began: float) -> None:
        """Records a download, which started at the monotonic time `began`, as a measurement."""
        self.break_even.fetched(transport, num_bytes, time.monotonic() - began)
        self.count(transport)


def _available_transports(transports: Sequence[str] | None) -> tuple[str, ...]:
    """Validates a choice of the transports shm, nixl and http; None means all available ones."""
    if transports is None:
        return tuple(known for known in TRANSPORTS if known != "nixl" or installed())
    if unknown := sorted(set(transports) - set(TRANSPORTS)):
        raise ValueError(f"unknown transport: {', '.join(unknown)}")
    if "nixl" in transports and not installed():
        raise ValueError("the transport nixl needs NIXL: pip install 'coppice-client[nixl]'")
    return tuple(transports)


class LeasedKv:
    """Prompt KV read from a server. As a context manager, it releases the handle at exit."""

    def __init__(self, handle: KvHandle, source: KvSource) -> None:
        self.handle = handle
        self._source = source

    def release(self) -> None:
        """Releases the KV on the server."""
        self._source.release(self.handle.handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.release()
        except CoppiceError as failure:
            self._source.count_failure(failure)  # the lease expires anyway

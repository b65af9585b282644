"""Source of prompt KV: transports, measured rates and counts of failures.

Recomputing the prompt is always possible, so failures are not raised to the caller. They are
counted, and the caller recomputes.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from coppice.errors import CoppiceError, ProblemError
from coppice.prompt_kv.break_even import BreakEven
from coppice.prompt_kv.http_client import KvHttpClient
from coppice.prompt_kv.nixl_agent import installed
from coppice.prompt_kv.nixl_reader import NixlReader
from coppice.prompt_kv.shm import SharedMemoryMap
from coppice.transport.address import parse_address
from coppice.transport.redirect_policy import RedirectPolicy
from coppice.wire.kv import KvHandle, KvLayout, KvLease, KvLeaseAnswer

TRANSPORTS = ("shm", "nixl", "http")
"""In order of decreasing speed."""


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
        """Layout of the data. Raises KvUnavailable if it is of another version than `version`."""
        query = "" if version is None else f"?version={version}"
        return self.endpoint.request("GET", f"/v1/kv/{handle}{query}").read(KvLayout)

    def renew(self, handle: str, seconds: float = 60.0) -> float:
        """Renews the lease; returns its seconds. Raises KvUnavailable if it has expired."""
        body = KvLease(seconds=seconds).model_dump()
        reply = self.endpoint.request("POST", f"/v1/kv/{handle}/lease", body)
        return reply.read(KvLeaseAnswer).lease_seconds

    def release(self, handle: str) -> None:
        """Frees the memory before the lease expires. An expired handle is ignored."""
        self.endpoint.request("DELETE", f"/v1/kv/{handle}")

    def worth_fetching(self, handle: KvHandle) -> bool:
        """True if fetching is faster than recomputing, by the rates measured so far."""
        offered = {locator.transport for locator in handle.locators}
        best = next((known for known in self.transports if known in offered), None)
        return best is not None and self.break_even.is_worth_fetching(handle, best)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Reports the duration of the trainer's own prefill, for worth_fetching."""
        self.break_even.computed(num_tokens, seconds)

    def count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def count_failure(self, error: CoppiceError) -> None:
        self.count(error.code if isinstance(error, ProblemError) else type(error).__name__)

    def fetched(self, transport: str, num_bytes: int, began: float) -> None:
        self.break_even.fetched(transport, num_bytes, time.monotonic() - began)
        self.count(transport)


def _available_transports(transports: Sequence[str] | None) -> tuple[str, ...]:
    """Validates the given transports; by default returns all that are available."""
    if transports is None:
        return tuple(known for known in TRANSPORTS if known != "nixl" or installed())
    if unknown := sorted(set(transports) - set(TRANSPORTS)):
        raise ValueError(f"no such transport: {', '.join(unknown)}")
    if "nixl" in transports and not installed():
        raise ValueError("the transport nixl needs NIXL: pip install 'coppice-client[nixl]'")
    return tuple(transports)

"""Where prompt KV is fetched from, what fetching has cost so far, and how often it came to nothing.

Recomputing is always right, so nothing that goes wrong here is an error for the caller: it is
counted, and the caller computes.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from coppice.errors import CoppiceError, ProblemError
from coppice.prompt_kv.break_even import BreakEven
from coppice.prompt_kv.http_client import KvHttpClient
from coppice.prompt_kv.nixl import installed
from coppice.prompt_kv.nixl_reader import NixlReader
from coppice.prompt_kv.shm import SharedMemoryMap
from coppice.transport.address import parse_address
from coppice.transport.redirect_policy import RedirectPolicy
from coppice.wire.kv import KvHandle, KvLayout, KvLease, KvLeaseAnswer

TRANSPORTS = ("shm", "nixl", "http")
"""From the fastest on."""


class KvSource:
    """A Coppice server as a source of prompt KV; takes what Rollouts takes for its address.

    `transports` are those that may be used, the best first; None: all that can be here. May be
    shared by threads. `counts` has the fetches by their transport, and those that came to nothing
    by the reason.
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
        """What the bytes are; KvUnavailable if they are of another version than asserted."""
        query = "" if version is None else f"?version={version}"
        return self.endpoint.request("GET", f"/v1/kv/{handle}{query}").read(KvLayout)

    def renew(self, handle: str, seconds: float = 60.0) -> float:
        """Seconds that the lease now runs; KvUnavailable if it is over."""
        body = KvLease(seconds=seconds).model_dump()
        reply = self.endpoint.request("POST", f"/v1/kv/{handle}/lease", body)
        return reply.read(KvLeaseAnswer).lease_seconds

    def release(self, handle: str) -> None:
        """Gives the bytes back before their lease is over. What is over is left alone."""
        self.endpoint.request("DELETE", f"/v1/kv/{handle}")

    def worth_fetching(self, handle: KvHandle) -> bool:
        """Whether fetching has been faster than the forward that `computed` was told of."""
        offered = {locator.transport for locator in handle.locators}
        best = next((known for known in self.transports if known in offered), None)
        return best is not None and self.break_even.is_worth_fetching(handle, best)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Tell how long the trainer's own forward of a prompt took."""
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
    """What is asked for by name and cannot be had is a mistake; what is not, is left out."""
    if transports is None:
        return tuple(known for known in TRANSPORTS if known != "nixl" or installed())
    if unknown := sorted(set(transports) - set(TRANSPORTS)):
        raise ValueError(f"no such transport: {', '.join(unknown)}")
    if "nixl" in transports and not installed():
        raise ValueError("the transport nixl needs NIXL: pip install 'coppice-client[nixl]'")
    return tuple(transports)

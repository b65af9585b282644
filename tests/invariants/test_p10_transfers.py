"""P10: readers of prompt KV do not slow down other requests.

The figures of the invariant are measured by bench/kv_transport.py on a quiet machine. This test
compares no times: it counts the bytes that the readers get while a request is answered.
"""

import re

import httpx
import pytest

from tests.invariants.kv_load import handle_of, latencies, readers
from tests.invariants.kv_server import kv_server
from tests.sample_sizes import num_examples

pytestmark = pytest.mark.slow

MAX_BYTES_PER_REQUEST = 2**25
"""On a busy machine readers wait as all others do."""
NUM_READS = num_examples(8)
REQUESTS_PER_ROUND = 5


def test_readers_get_little_while_a_request_is_answered() -> None:
    num_requests, num_bytes = 0, 0
    with kv_server() as url:
        handle = handle_of(url, 512)
        with readers(url, handle, 4):
            before = sent_bytes(url)
            while num_bytes < NUM_READS * handle.num_bytes and num_requests < 50_000:
                latencies(url, 10)
                num_requests += 10 * REQUESTS_PER_ROUND
                num_bytes = sent_bytes(url) - before
    assert num_bytes >= NUM_READS * handle.num_bytes, "the readers did not read"
    assert num_bytes / num_requests < MAX_BYTES_PER_REQUEST


def sent_bytes(url: str) -> int:
    found = re.search(
        r"^coppice_kv_sent_bytes_total (\S+)$", httpx.get(f"{url}/metrics").text, re.M
    )
    assert found is not None
    return int(float(found[1]))

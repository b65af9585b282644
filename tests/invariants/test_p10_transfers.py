"""P10: readers of prompt KV do not slow down other requests.

The figures of the invariant are measured by bench/kv_transport.py on a quiet machine. The bounds
here also hold on a busy machine: they show that no request blocks during a transfer.
"""

import pytest

from tests.invariants.kv_load import handle_of, latencies, loopback_bytes_per_second, readers
from tests.invariants.kv_server import kv_server

pytestmark = pytest.mark.slow


def test_probes_and_small_rollouts_are_answered_during_four_reads() -> None:
    with kv_server(loopback_bytes_per_second() / 4) as url:
        handle = handle_of(url, 512)
        idle = latencies(url, 50)
        with readers(url, handle, 4):
            loaded = latencies(url, 50)
    assert loaded.p99_of_probes < 1000
    assert loaded.p50_of_rollouts < 6 * idle.p50_of_rollouts + 50

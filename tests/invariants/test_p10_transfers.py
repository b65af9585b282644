"""P10: readers of prompt KV do not slow down other requests.

The figures of the invariant are measured by bench/kv_transport.py on a quiet machine. This test
compares no times: on any machine, requests are answered while reads are in progress.
"""

import pytest

from tests.invariants.kv_load import handle_of, latencies, readers
from tests.invariants.kv_server import kv_server

pytestmark = pytest.mark.slow

BYTES_PER_SECOND = 2**20
"""So slow that the reads of 72 MiB take longer than a minute."""


def test_probes_and_small_rollouts_are_answered_during_four_reads() -> None:
    with (
        kv_server(BYTES_PER_SECOND) as url,
        readers(url, handle_of(url, 512), 4, after="begun") as reports,
    ):
        latencies(url, 50)
    assert reports == [""] * 4, "requests waited until a read had ended"

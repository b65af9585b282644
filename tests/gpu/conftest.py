"""A check that no GPU test makes the next ones void."""

import sys
from collections.abc import Iterator

import pytest

from tests.gpu.device import ON_GPU

CPU_SHIM = "vllm.v1.worker.cpu.shm"
"""Module of vLLM that replaces torch's streams, events and pinned memory when imported."""


@pytest.fixture(autouse=True)
def own_streams() -> Iterator[None]:
    yield
    assert not (ON_GPU and CPU_SHIM in sys.modules), f"{CPU_SHIM} has been imported"

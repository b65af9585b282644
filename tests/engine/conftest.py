"""Restoration of the process after tests that start vLLM in it."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def restored_process() -> Iterator[None]:
    """The environment and the processors of the process, both of which vLLM changes."""
    environment, affinity = dict(os.environ), os.sched_getaffinity(0)
    yield
    os.environ.clear()
    os.environ.update(environment)
    os.sched_setaffinity(0, affinity)

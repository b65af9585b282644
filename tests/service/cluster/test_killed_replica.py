"""A replica of a cluster of processes that is killed while it loads weights."""

import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.invariants.service_process import until
from tests.soak.cluster_model import CountingModel
from tests.soak.replicas import Replica, replicas

pytestmark = pytest.mark.slow

MODEL = CountingModel()
ACTIVATION_SECONDS = 30.0  # well below the limit of all waits for other replicas


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Sequence[Replica]]:
    with (
        tempfile.TemporaryDirectory() as arenas,
        replicas(MODEL, tmp_path, Path(arenas)) as (_, found),
    ):
        yield found


def upload(replica: Replica, label: str) -> None:
    content = MODEL.weights(int(label[1:]))
    httpx.put(f"{replica.url}/v1/weights/{label}", content=content).raise_for_status()


def activate(replica: Replica, label: str) -> float:
    """Activates a version on all replicas; returns the seconds until the answer."""
    began = time.monotonic()
    address = f"{replica.url}/v1/weights/{label}/activate"
    httpx.post(address, json={}, timeout=2 * ACTIVATION_SECONDS).raise_for_status()
    return time.monotonic() - began


def served(fleet: Sequence[Replica]) -> set[object]:
    return {replica.status()["weights_version"] for replica in fleet}


def test_replica_killed_during_a_load_returns_with_the_version_of_the_others(
    fleet: Sequence[Replica],
) -> None:
    first, victim, _ = fleet
    upload(first, "v1")
    activate(first, "v1")
    until(lambda: served(fleet) == {"v1"}, seconds=60, what="all replicas serve v1")
    upload(first, "v2")
    with ThreadPoolExecutor(1) as threads:
        activation = threads.submit(activate, first, "v2")
        until(lambda: victim.status()["stage"] == "activating", seconds=60, what="a load")
        victim.kill()
        assert activation.result() < ACTIVATION_SECONDS
    victim.start()
    assert victim.status()["weights_version"] == "v2", "it is ready once it has caught up"
    assert served(fleet) == {"v2"}


@pytest.mark.exhaustive
def test_version_that_only_a_killed_replica_has_loaded_is_lost_as_a_whole(
    fleet: Sequence[Replica],
) -> None:
    victim, *others = fleet
    upload(victim, "v1")
    with ThreadPoolExecutor(1) as threads:
        activation = threads.submit(activate, victim, "v1")
        until(lambda: victim.status()["stage"] == "activating", seconds=60, what="a load")
        victim.kill()
        assert isinstance(activation.exception(), httpx.TransportError)
    victim.start()
    until(lambda: served(fleet) == {"v0"}, seconds=60, what="all replicas serve v0")
    activate(others[0], "v1")
    until(lambda: served(fleet) == {"v1"}, seconds=60, what="the others had fetched v1")

"""Ranks that a Ray cluster places on two nodes: run by `make soak`, not by `make test-full`.

python -m pytest tests/engine/machines/with_ray.py
"""

import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from coppice import Rollouts
from coppice.rollout_results import Sample
from tests.compat import programs
from tests.engine.adapters.peft_adapters import saved, under
from tests.engine.machines.ray_cluster import RAY_PACKAGES, VARIABLES, RayCluster, ray_cluster
from tests.engine.machines.second_machine import LOOPBACK, SecondMachine, namespace_or_skip
from tests.engine.seedling import MODEL, reference, teacher_forced
from tests.invariants.service_process import (
    ServerHome,
    ServiceProcess,
    home,
    service,
    until,
)

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.filterwarnings("ignore")]

PROMPT = [5 + i * 7 % 200 for i in range(100)]
END_SECONDS = 60.0
SETTINGS = (
    *("--engine.model", str(MODEL), "--engine.dtype", "float32"),
    *("--engine.tensor-parallel-size", "2", "--engine.distributed-executor-backend", "ray"),
    *("--engine.cache-bytes", str(2**27), "--engine.max-context-tokens", "1024"),
    *("--engine.max-adapters", "1"),
)


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    programs.install("ray")


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: Ray creates Unix sockets below it, whose paths have at most 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="ray-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def place() -> Iterator[ServerHome]:
    with home() as made:
        yield made


@pytest.fixture
def changed(folder: Path) -> Path:
    """A changed model, next to an adapter."""
    changed = folder / "v1"
    shutil.copytree(MODEL, changed)
    draw = torch.Generator().manual_seed(11)
    disturbed = {
        name: values + 0.2 * values.std() * torch.randn(values.shape, generator=draw)
        for name, values in load_file(MODEL / "model.safetensors").items()
    }
    save_file(disturbed, changed / "model.safetensors", metadata={"format": "pt"})
    saved(folder / "adapter", seed=1)
    return changed


@contextmanager
def serving(
    machine: SecondMachine, folder: Path, place: ServerHome, *flags: str
) -> Iterator[tuple[RayCluster, ServiceProcess]]:
    with ray_cluster(machine, folder) as cluster:
        address = ("--engine.ray-address", cluster.address)
        with service(place, *SETTINGS, *address, *flags, path=RAY_PACKAGES) as server:
            yield cluster, server


def samples(rollouts: Rollouts, **options: Any) -> list[Sample]:
    chosen = {"n": 4, "max_tokens": 24, "temperature": 0.0, "ignore_eos": True} | options
    (group,) = rollouts.rollout([PROMPT], **chosen).groups
    return list(group.samples)


def assert_greedy(found: list[Sample], model: Any) -> None:
    """All samples are the greedy continuation of the model."""
    tokens = list(map(int, found[0].token_ids))
    assert all(list(sample.token_ids) == tokens for sample in found)
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    assert logits.argmax(-1).tolist() == tokens


def assert_scored(found: list[Sample], model: Any) -> None:
    """Samples at temperature 1 have the log-probabilities of the model."""
    for sample in found:
        expected = teacher_forced(model, PROMPT, list(map(int, sample.token_ids)))
        np.testing.assert_allclose(sample.logprobs, expected, atol=2e-3)


def ranks(cluster: RayCluster) -> list[psutil.Process]:
    return [*cluster.first.ranks(), *cluster.second.ranks()]


def test_ranks_on_two_nodes_sample_and_update_as_one(
    folder: Path, place: ServerHome, changed: Path
) -> None:
    """Groups, an abort, and weights and an adapter in a directory that both nodes see."""
    adapter, hidden = folder / "adapter", folder / "hidden"
    hidden.mkdir()
    with (
        namespace_or_skip(hidden) as machine,
        serving(machine, folder, place) as (cluster, server),
        Rollouts(server.url) as rollouts,
    ):
        assert [len(node.ranks()) for node in (cluster.first, cluster.second)] == [1, 1]
        assert_greedy(samples(rollouts), reference())
        assert_scored(samples(rollouts, temperature=1.0), reference())
        rollouts.publish_adapter("a", "a1", adapter)
        assert_scored(samples(rollouts, adapter="a", temperature=1.0), under(adapter))
        rollouts.unload_adapter("a")

        pending = rollouts.submit([PROMPT], max_tokens=800, ignore_eos=True)
        assert pending.abort().groups[0].outcome == "cancelled"

        rollouts.publish_weights("v1", changed)
        assert_greedy(samples(rollouts), reference(changed))
        server.signal(signal.SIGTERM)
        assert server.wait(END_SECONDS) == 0
        until(lambda: not ranks(cluster), seconds=END_SECONDS, what="the ranks end")


def test_siblings_drafts_are_used_by_ranks_on_two_nodes(folder: Path, place: ServerHome) -> None:
    flags = (
        *("--speculation.mode", "siblings", "--speculation.allow-predicted-loss", "true"),
        *("--engine.max-batched-tokens", "4096"),
    )
    with (
        serving(LOOPBACK, folder, place, *flags) as (_, server),
        Rollouts(server.url) as rollouts,
        httpx.Client(base_url=server.url, timeout=END_SECONDS) as http,
    ):
        for _ in range(2):
            assert_greedy(samples(rollouts), reference())
        until(lambda: accepted_tokens(http) > 0, seconds=END_SECONDS, what="drafts are used")


def accepted_tokens(http: httpx.Client) -> float:
    """Draft tokens that were accepted."""
    name = "coppice_speculation_accepted_tokens_total{"
    lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith(name)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_start_names_the_node_without_the_model(folder: Path, place: ServerHome) -> None:
    model = place.weights / "model"
    shutil.copytree(MODEL, model)
    with (
        namespace_or_skip(place.weights) as machine,
        pytest.raises(AssertionError, match="the engine did not start"),
        serving(machine, folder, place, "--engine.model", str(model)),
    ):
        pass
    assert f"the Ray node {machine.address} has no model at {model}" in place.log.read_text()


def kill_rank(cluster: RayCluster) -> None:
    (rank,) = cluster.second.ranks()
    rank.kill()


@pytest.mark.parametrize(
    "kill",
    [
        pytest.param(kill_rank, id="rank"),
        pytest.param(lambda cluster: cluster.second.kill(), id="node"),
        pytest.param(lambda cluster: cluster.first.kill(), id="head"),
    ],
)
def test_engine_fails_with_a_killed_part_of_the_cluster(
    folder: Path, place: ServerHome, kill: Callable[[RayCluster], None]
) -> None:
    """Its requests fail, and its processes end."""
    with (
        serving(LOOPBACK, folder, place) as (cluster, server),
        httpx.Client(base_url=server.url, timeout=END_SECONDS) as http,
        ThreadPoolExecutor() as pool,
    ):
        group = {"prompt": {"token_ids": PROMPT}, "n": 4}
        sampling = {"max_tokens": 900, "ignore_eos": True}
        request = {"groups": [group], "sampling": sampling}
        answer = pool.submit(http.post, "/v1/rollouts", json=request)
        until(lambda: num_running(http) > 0, seconds=END_SECONDS, what="samples are running")
        kill(cluster)
        assert answer.result().json()["code"] == "engine_dead"
        until(lambda: not is_alive(http), seconds=END_SECONDS, what="the engine fails")
        until(lambda: not ranks(cluster), seconds=END_SECONDS, what="the ranks end")


def num_running(http: httpx.Client) -> int:
    return int(http.get("/v1/status").json()["num_samples_running"])


def is_alive(http: httpx.Client) -> bool:
    return http.get("/livez").is_success


def test_ranks_end_with_a_killed_service(folder: Path, place: ServerHome) -> None:
    with serving(LOOPBACK, folder, place) as (cluster, server):
        assert len(ranks(cluster)) == 2
        server.process.kill()
        until(lambda: not ranks(cluster), seconds=END_SECONDS, what="the ranks end")

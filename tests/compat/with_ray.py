"""Clients that need Ray, in environments of their own: run by `make soak`, not by `make test-full`.

python -m pytest tests/compat/with_ray.py
"""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from coppice.integrations.weights_version_labels import step_of
from examples.seedling.enlarge import SEEDLING
from tests.compat import programs
from tests.invariants.service_process import home, service

pytestmark = [pytest.mark.engine, pytest.mark.long]


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    programs.install("verl", "miles")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: Ray creates Unix sockets below it, whose paths have at most 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="ray-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def url(folder: Path) -> Iterator[str]:
    settings = ("--engine.dtype", "float32", "--weights.source-directories", str(folder))
    with home() as place, service(place, *settings) as served:
        yield served.url


def run_program_json(environments: list[str], folder: Path, program: str, *arguments: str) -> Any:
    ray = {
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "disabled",  # it would write a token to the home directory
        "RAY_TMPDIR": str(folder),
        "RAY_worker_niceness": "0",  # its default of 15 takes minutes longer on a busy machine
    }
    return programs.run_client_program(
        environments, program, *arguments, seconds=900, variables=ray
    )


def versions(url: str) -> list[int | None]:
    """Training steps of all served versions, except the initial model."""
    answer = httpx.get(f"{url}/v1/weights").json()
    return [step_of(version["version"]) for version in answer["versions"][1:]]


@pytest.mark.parametrize("trainer", ["sync", "legacy", "apart"])
def test_verl_trainers_serve_every_training_step(url: str, folder: Path, trainer: str) -> None:
    log = run_program_json(["verl"], folder, "verl.training", trainer, url, str(folder))
    assert len(log) == 2
    assert versions(url)[:3] == [0, 1, 2], "the trainer's own before its first step, and each after"
    assert all(step["actor/grad_norm"] > 0 for step in log)
    if trainer != "apart":  # these recompute the logprobs of samples
        assert all(step["training/rollout_actor_probs_pearson_corr"] > 0.99 for step in log)


def test_verl_actor_computes_the_logprobs_of_truncated_samples(url: str, folder: Path) -> None:
    """verl's FSDP actor in both of its layouts, with supports from both of its trainers."""
    found = run_program_json(["verl"], folder, "verl.actor", url)
    assert min(found["without"]) < 0.9
    for layout in ("padded", "packed"):
        assert len(found[layout]) == 2 * len(found["without"]) > 100, "both trainers"
        assert (min(found[layout]), max(found[layout])) == pytest.approx((1, 1), abs=1e-4)
        assert found[f"{layout}_grad_norm"] > 0


def test_verl_trains_on_truncated_samples(url: str, folder: Path) -> None:
    """Without supports the probabilities differ by up to 0.2; in bfloat16, by rounding."""
    log = run_program_json(["verl"], folder, "verl.training", "replayed", url, str(folder))
    assert len(log) == 2
    assert all(step["training/rollout_probs_diff_max"] < 0.05 for step in log)
    assert all(step["actor/grad_norm"] > 0 for step in log)


def test_verl_distills_from_the_server_as_its_teacher(url: str, folder: Path) -> None:
    log = run_program_json(["verl"], folder, "verl.training", "distilled", url, str(folder))
    assert len(log) == 2
    assert all(step["actor/grad_norm"] > 0 for step in log)


def test_verl_example_trains(url: str, folder: Path) -> None:
    log = run_program_json(["verl"], folder, "verl.training", "example", url, str(folder))
    assert len(log) == 2
    assert versions(url)[:3] == [0, 1, 2]
    assert 0 < sum(step["critic/rewards/mean"] for step in log) < 2


def test_verl_resumes_requests_aborted_by_an_update(url: str, folder: Path) -> None:
    answer = run_program_json(["verl"], folder, "verl.rollouts", url)
    assert answer["addresses"] == [url.removeprefix("http://")]
    whole, long = answer["whole"], answer["long"]
    assert whole["stop_reason"] == "completed"
    assert len(whole["token_ids"]) == len(whole["log_probs"]) > 0
    assert whole["extra_fields"]["global_steps"] == 1
    assert long["stop_reason"] == "length"
    assert len(long["token_ids"]) == len(long["log_probs"]) == 1000
    assert long["extra_fields"]["min_global_steps"] == 1
    assert long["extra_fields"]["max_global_steps"] == 2
    turned_away = answer["turned_away"]
    assert (turned_away["token_ids"], turned_away["stop_reason"]) == ([], "aborted")
    assert "min_p=0.1 is not supported: use return_support" in answer["refusal"]


def test_miles_updates_weights_and_resumes_aborted_rollouts(url: str, folder: Path) -> None:
    weights = folder / "step_1"
    shutil.copytree(SEEDLING, weights)
    answer = run_program_json(["miles", "verl"], folder, "miles.rollouts", url, str(weights))
    for sample in (answer["whole"], answer["part"], answer["resumed"]):
        assert len(sample["rollout_log_probs"]) == sample["response_length"] > 0
    assert answer["whole"]["status"] in ("completed", "truncated")
    part, resumed = answer["part"], answer["resumed"]
    assert part["status"] == "aborted"
    assert part["response_length"] < 2000
    assert resumed["status"] == "truncated"
    assert resumed["tokens"][: len(part["tokens"])] == part["tokens"]
    assert resumed["response_length"] == part["response_length"] + 16
    assert answer["version"] == "update-1"
    assert part["weight_versions"] != resumed["weight_versions"][-1:] == ["update-1"]
    assert "update_weights_from_disk" in answer["refusal"]

"""The trainers' examples, as their tutorials start them, over a real server."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coppice import Rollouts
from tests.compat.programs import install, run_client_program
from tests.invariants.service_process import ROOT, home, service

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive, pytest.mark.long]

EXAMPLES = ("trl", "verl", "openai_client", "custom_loop")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    install("clients")
    with home() as place, service(place) as served:
        yield served.url


def run(example: str, folder: Path, *arguments: str) -> str:
    """The output of an example."""
    ran = subprocess.run(
        [sys.executable, "-m", f"examples.{example}", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'client'}:{ROOT / '.clients'}"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-6000:]
    return ran.stdout


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_has_at_most_60_lines_of_python(example: str) -> None:
    files = (ROOT / "examples" / example).glob("*.py")
    assert 0 < sum(len(file.read_text().splitlines()) for file in files) <= 60


def test_custom_loop_serves_the_weights_of_its_last_step(url: str, tmp_path: Path) -> None:
    output = run("custom_loop", tmp_path, url)
    rewards = [float(reward) for reward in re.findall(r"mean reward ([\d.]+)", output)]
    assert len(rewards) == 3
    assert 0.2 < sum(rewards) / 3 < 1
    with Rollouts(url) as rollouts:
        assert f"serving {rollouts.status().weights_version}\n" in output


def test_trl_trains_and_every_step_is_served(url: str, tmp_path: Path) -> None:
    with Rollouts(url) as rollouts:
        before = rollouts.status().weights_sequence
        output = run("trl", tmp_path, url)
        status = rollouts.status()
    assert status.weights_version.startswith("trl-")
    assert status.weights_sequence == before + 3
    assert "'train_loss'" in output


def test_verl_reads_the_configuration_and_samples_the_published_step(url: str) -> None:
    answer = run_client_program(["clients"], "verl_example", url)
    assert answer["name"] == "coppice"
    assert answer["steps"] == [1]
    assert len(answer["scores"]) == 16
    assert 0 < sum(answer["scores"]) < 16
    with Rollouts(url) as rollouts:
        assert rollouts.status().weights_version == answer["version"]


def test_verl_data_set_is_written(tmp_path: Path) -> None:
    install("clients")
    run("verl.sums", tmp_path, str(tmp_path / "sums.parquet"))
    assert (tmp_path / "sums.parquet").read_bytes()[:4] == b"PAR1"


def test_openai_client_gets_token_ids_logprobs_and_versions(url: str, tmp_path: Path) -> None:
    output = run("openai_client", tmp_path, url)
    assert re.search(r"^stop: '.*answer: 46'$", output, re.MULTILINE)
    counts = re.findall(r"^(\d+) tokens, (\d+) logprobs, weights \['(.+)'\]$", output, re.MULTILINE)
    with Rollouts(url) as rollouts:
        version = rollouts.status().weights_version
    assert [(tokens, version) for tokens, _, version in counts] == [
        (logprobs, version) for _, logprobs, _ in counts
    ]
    assert len(counts) == 4


def test_distillation_lowers_the_divergence_from_the_teacher(url: str, tmp_path: Path) -> None:
    with home() as place, service(place) as student:
        output = run("distillation", tmp_path, student.url, url)
    first, last = (float(kl) for kl in re.findall(r"held-out: KL ([\d.]+)", output))
    assert last < 0.7 * first

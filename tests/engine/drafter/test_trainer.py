"""The training process: what it hears, when it trains, what it leaves behind."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from engine.drafter.trainer.inbox import Ears
from engine.drafter.trainer.loss_tracker import LOOKED_BACK
from engine.drafter.trainer.messages import (
    Adopted,
    Paused,
    Progress,
    Published,
    Sample,
    Tells,
    checkpoint_file,
    line_of,
    read_line,
)
from engine.drafter.trainer.model_trainer import Learner
from engine.drafter.trainer.training_loop import LEAST_STEPS, LEAST_TOKENS, MOST_PASSES, Trainer
from engine.weights.checkpoint import read_served
from engine.weights.validation import check
from tests.engine.drafter.test_model_trainer import packed
from tests.tools import ROOT

RESPONSE = [6, 7, 8, 9] * 16
PATIENCE_SECONDS = 600
SAID = line_of(Sample(version="v0", prompt=[3], response=RESPONSE))


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def ears() -> Ears:
    return Ears()


@pytest.fixture
def told() -> list[Tells]:
    return []


@pytest.fixture
def trainer(drafter_folder: Path, ears: Ears, told: list[Tells]) -> Trainer:
    learner = Learner(drafter_folder, trained="all")
    return Trainer(learner, ears, drafter_folder, told.append, published_seconds=10.0, clock=Time())


def test_what_travels_is_what_was_sent() -> None:
    sent = (
        Sample(version="v", prompt=[1], response=[2, 3]),
        Sample(version="v", prompt=[1], response=[2], likeliest="AAAA"),
        Paused(paused=True),
        Adopted(path="/x"),
        Published(path="/y", num_steps=3),
        Progress(num_steps=1, num_tokens=2, loss=0.5),
    )
    assert [read_line(line_of(message)) for message in sent] == list(sent)


def test_what_was_brought_is_gone_on_from_after_a_restart(
    trainer: Trainer, ears: Ears, drafter_folder: Path, tmp_path: Path
) -> None:
    brought, file = Learner(drafter_folder, trained="all"), tmp_path / "brought.safetensors"
    for _ in range(40):
        brought.step(packed())
    brought.write_drafter(file)
    ears.listen([line_of(Adopted(path=str(file)))])
    trainer.turn()
    again = Learner(drafter_folder, trained="all")
    assert again.resume(checkpoint_file(drafter_folder))
    torch.testing.assert_close(again.loss_of(packed()), brought.loss_of(packed()))


def test_what_was_brought_and_is_gone_already_is_passed_over(
    trainer: Trainer, ears: Ears, tmp_path: Path
) -> None:
    ears.listen([line_of(Adopted(path=str(tmp_path / "gone.safetensors")))])
    trainer.turn()


def test_it_waits_for_enough_to_learn_from_and_while_it_is_told_to(
    trainer: Trainer, ears: Ears
) -> None:
    ears.listen([SAID])
    assert not trainer.turn()
    ears.listen([SAID] * (LEAST_TOKENS // len(RESPONSE)))
    assert trainer.turn()
    ears.listen([line_of(Paused(paused=True))])
    assert not trainer.turn()
    ears.listen([line_of(Paused(paused=False))])
    assert trainer.turn()


def test_what_is_known_by_heart_is_left(trainer: Trainer, ears: Ears, told: list[Tells]) -> None:
    ears.listen([SAID] * (LEAST_TOKENS // len(RESPONSE) + 1))
    turns = 0
    while trainer.turn():
        turns += 1
    passes = trainer.num_learned / ears.buffer.num_received
    assert MOST_PASSES <= passes < MOST_PASSES + 1
    published = [message for message in told if isinstance(message, Published)]
    assert published or turns < LEAST_STEPS


@pytest.mark.parametrize("settled", [True, False])
def test_once_there_is_little_to_learn_it_rests_after_every_step(
    drafter_folder: Path, ears: Ears, settled: bool
) -> None:
    learner = Learner(drafter_folder, trained="all")
    if settled:
        for _ in range(LOOKED_BACK):
            learner.course.observed(6.0)
    steps: list[int] = []

    def slept(seconds: float) -> None:
        steps.append(learner.num_steps)
        ears.ended = len(steps) == 3

    ears.listen([SAID] * (LEAST_TOKENS // len(RESPONSE)))
    ears.ended = False
    Trainer(
        learner,
        ears,
        drafter_folder,
        lambda message: None,
        published_seconds=1e9,
        clock=Time(),
        sleep=slept,
    ).run()
    assert (steps[0] == 1) == settled


@pytest.mark.engine
@pytest.mark.alone  # beside other work it may get no time at all, and is meant to
def test_the_process_trains_publishes_keeps_and_resumes(drafter_folder: Path) -> None:
    """As the server runs it, with the least priority there is, until its input ends."""
    command = [
        *(sys.executable, "-m", "engine.drafter.trainer", "--drafter", str(drafter_folder)),
        *("--folder", str(drafter_folder), "--trained", "all", "--published-seconds", "0.5"),
    ]

    def run(until: type[Tells]) -> list[Tells]:
        heard: list[Tells] = []
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            killer = threading.Timer(PATIENCE_SECONDS, process.kill)
            killer.start()
            process.stdin.write(SAID * 200)
            process.stdin.flush()
            for line in process.stdout:
                message = read_line(line)
                assert isinstance(message, Published | Progress)
                heard.append(message)
                nice = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[16]
                assert nice == "19"
                if isinstance(message, until) and message.num_steps and not process.stdin.closed:
                    process.stdin.close()
            killer.cancel()
        assert process.returncode == 0
        return heard

    first = run(Progress)
    reached = json.loads(_metadata(checkpoint_file(drafter_folder))["reached"])
    assert reached["num_steps"] >= first[-1].num_steps > 0
    published = next(m for m in run(Published) if isinstance(m, Published))
    assert published.num_steps > reached["num_steps"]
    assert check(read_served(drafter_folder), Path(published.path)).tensors


def _metadata(file: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(file, framework="numpy") as opened:
        return dict(opened.metadata())

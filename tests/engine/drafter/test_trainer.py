"""The training process: its inbox, its schedule and its files."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from engine.drafter.trainer.messages import (
    AdoptWeights,
    FromTrainer,
    Progress,
    Published,
    Sample,
    SetPaused,
    checkpoint_file,
    decode_line,
    encode_line,
)
from engine.drafter.trainer.model_trainer import WINDOW_STEPS, ModelTrainer
from engine.drafter.trainer.replay_buffer import Inbox
from engine.drafter.trainer.training_loop import (
    MAX_EPOCHS,
    MIN_STEPS_BETWEEN_PUBLISHES,
    MIN_TOKENS_TO_START,
    TrainingLoop,
)
from engine.weights.checkpoint import read_base_checkpoint
from engine.weights.validation import check_checkpoint
from tests.engine.drafter.test_model_trainer import packed
from tests.tools import ROOT

RESPONSE = [6, 7, 8, 9] * 16
TIMEOUT_SECONDS = 600
SAID = encode_line(Sample(version="v0", prompt=[3], response=RESPONSE))


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
def sent() -> list[FromTrainer]:
    return []


@pytest.fixture
def trainer(drafter_folder: Path, inbox: Inbox, sent: list[FromTrainer]) -> TrainingLoop:
    model_trainer = ModelTrainer(drafter_folder)
    return TrainingLoop(
        model_trainer, inbox, drafter_folder, sent.append, published_seconds=10.0, clock=Time()
    )


def test_messages_are_serialized_without_loss() -> None:
    sent = (
        Sample(version="v", prompt=[1], response=[2, 3]),
        Sample(version="v", prompt=[1], response=[2], top_logprobs="AAAA"),
        SetPaused(paused=True),
        AdoptWeights(path="/x"),
        Published(path="/y", num_steps=3),
        Progress(num_steps=1, num_tokens=2, loss=0.5),
    )
    assert [decode_line(encode_line(message)) for message in sent] == list(sent)


def test_training_continues_from_an_import_after_a_restart(
    trainer: TrainingLoop, inbox: Inbox, drafter_folder: Path, tmp_path: Path
) -> None:
    brought, file = ModelTrainer(drafter_folder), tmp_path / "brought.safetensors"
    for _ in range(40):
        brought.step(packed())
    brought.write_drafter(file)
    inbox.receive([encode_line(AdoptWeights(path=str(file)))])
    trainer.run_once()
    again = ModelTrainer(drafter_folder)
    assert again.resume(checkpoint_file(drafter_folder))
    torch.testing.assert_close(again.compute_loss(packed()), brought.compute_loss(packed()))


def test_import_that_is_gone_already_is_skipped(
    trainer: TrainingLoop, inbox: Inbox, tmp_path: Path
) -> None:
    inbox.receive([encode_line(AdoptWeights(path=str(tmp_path / "gone.safetensors")))])
    trainer.run_once()


def test_trainer_waits_for_enough_samples_and_while_paused(
    trainer: TrainingLoop, inbox: Inbox
) -> None:
    inbox.receive([SAID])
    assert not trainer.run_once()
    inbox.receive([SAID] * (MIN_TOKENS_TO_START // len(RESPONSE)))
    assert trainer.run_once()
    inbox.receive([encode_line(SetPaused(paused=True))])
    assert not trainer.run_once()
    inbox.receive([encode_line(SetPaused(paused=False))])
    assert trainer.run_once()


def test_memorized_samples_are_skipped(
    trainer: TrainingLoop, inbox: Inbox, sent: list[FromTrainer]
) -> None:
    inbox.receive([SAID] * (MIN_TOKENS_TO_START // len(RESPONSE) + 1))
    turns = 0
    while trainer.run_once():
        turns += 1
    passes = trainer.num_trained_tokens / inbox.buffer.num_received
    assert MAX_EPOCHS <= passes < MAX_EPOCHS + 1
    published = [message for message in sent if isinstance(message, Published)]
    assert published or turns < MIN_STEPS_BETWEEN_PUBLISHES


@pytest.mark.parametrize("settled", [True, False])
def test_with_little_to_learn_it_sleeps_after_every_step(
    drafter_folder: Path, inbox: Inbox, settled: bool
) -> None:
    model_trainer = ModelTrainer(drafter_folder)
    if settled:
        for _ in range(WINDOW_STEPS):
            model_trainer.loss_tracker.update(6.0)
    steps: list[int] = []

    def slept(seconds: float) -> None:
        steps.append(model_trainer.num_steps)
        inbox.ended = len(steps) == 3

    inbox.receive([SAID] * (MIN_TOKENS_TO_START // len(RESPONSE)))
    inbox.ended = False
    TrainingLoop(
        model_trainer,
        inbox,
        drafter_folder,
        lambda message: None,
        published_seconds=1e9,
        clock=Time(),
        sleep=slept,
    ).run()
    assert (steps[0] == 1) == settled


@pytest.mark.engine
@pytest.mark.alone  # a busy machine may give it no time at all, by design
def test_process_trains_publishes_saves_and_resumes(drafter_folder: Path) -> None:
    """As the server runs it, with the lowest priority, until its input is closed."""
    command = [
        *(sys.executable, "-m", "engine.drafter.trainer", "--drafter", str(drafter_folder)),
        *("--folder", str(drafter_folder), "--published-seconds", "0.5"),
    ]

    def run(until: type[FromTrainer]) -> list[FromTrainer]:
        heard: list[FromTrainer] = []
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            killer = threading.Timer(TIMEOUT_SECONDS, process.kill)
            killer.start()
            process.stdin.write(SAID * 200)
            process.stdin.flush()
            for line in process.stdout:
                message = decode_line(line)
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
    progress = json.loads(_metadata(checkpoint_file(drafter_folder))["progress"])
    assert progress["num_steps"] >= first[-1].num_steps > 0
    published = next(m for m in run(Published) if isinstance(m, Published))
    assert published.num_steps > progress["num_steps"]
    assert check_checkpoint(read_base_checkpoint(drafter_folder), Path(published.path)).tensors


def _metadata(file: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(file, framework="numpy") as opened:
        return dict(opened.metadata())

"""The GRPO example learns, reports a gain only if there is one, and plots it."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from coppice import Sample
from coppice.train import TrainingGroup, group_logprobs
from coppice.wire.rollouts import FinishReason
from examples.grpo import __main__ as demo
from examples.grpo.history import Step, compute_gain, save, table
from examples.grpo.learner import Learner
from examples.grpo.picture import draw
from examples.grpo.questions import Questions
from examples.grpo.stopwatch import PARTS, Stopwatch
from examples.seedling.arithmetic import parse
from examples.seedling.enlarge import SEEDLING
from tests.examples.demos import run_demo

ROOT = Path(__file__).parents[2]


def history(rewards: list[float]) -> list[Step]:
    return [
        Step(
            number=number,
            held_out_reward=reward,
            training_reward=reward,
            mean_tokens=30.0,
            p95_tokens=100.0,
            versions_behind=0.5,
            seconds=dict.fromkeys(PARTS, 0.25),
        )
        for number, reward in enumerate(rewards, 1)
    ]


def questions(seed: int = 1) -> Questions:
    return Questions(AutoTokenizer.from_pretrained(SEEDLING), seed=seed, num_held_out=4)


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.exhaustive
def test_example_learns(tmp_path: Path) -> None:
    found, output = run_demo("examples.grpo", tmp_path)
    steps = [Step(**step) for step in found]
    gain = compute_gain(steps)
    assert gain.size >= 0.10
    assert gain.size >= 3 * gain.standard_error
    assert str(gain) in output
    # Weights were updated while samples ran: tokens of one step have more than one lag.
    assert 0 < sum(step.versions_behind for step in steps) < len(steps)
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_gain_compares_the_last_ten_steps_with_the_first_ten() -> None:
    gain = compute_gain(history([0.4, 0.6] * 5 + [0.0] * 7 + [0.7, 0.9] * 5))
    assert gain.before == pytest.approx(0.5)
    assert gain.after == pytest.approx(0.8)
    assert gain.standard_error == pytest.approx(math.sqrt(2 * (0.1 / 9) / 10))
    assert gain.learned


@pytest.mark.parametrize(
    ("rewards", "why"),
    [
        ([0.50] * 10 + [0.59] * 10, "sure, but small"),
        ([0.0, 1.0] * 5 + [0.2, 1.0] * 5, "large enough, but within three standard errors"),
        ([0.8] * 10 + [0.5] * 10, "a loss"),
    ],
)
def test_smaller_gain_is_not_reported(rewards: list[float], why: str) -> None:
    assert not compute_gain(history(rewards)).learned, why


def test_gain_of_too_few_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 20 steps, not 19"):
        compute_gain(history([0.5] * 19))


def test_table_has_a_row_for_every_ten_steps() -> None:
    head, *lines = table(history([0.25] * 10 + [0.75] * 5)).splitlines()
    assert all(part in head for part in PARTS)
    assert [line.split()[:2] for line in lines] == [["1-10", "0.250"], ["11-15", "0.750"]]


def test_history_is_saved_and_plotted(tmp_path: Path) -> None:
    steps = history([0.5] * 10 + [0.7] * 10)
    save(steps, tmp_path / "steps.json")
    assert [Step(**s) for s in json.loads((tmp_path / "steps.json").read_text())] == steps
    draw(steps, compute_gain(steps), tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_stopwatch_sums_its_intervals() -> None:
    watch = Stopwatch()
    for _ in range(2):
        with watch("rewards"):
            pass
    assert set(watch.seconds) == set(PARTS)
    assert watch.seconds["rewards"] > 0 == watch.seconds["weights"]


def test_held_out_questions_are_fixed_and_never_trained_on() -> None:
    one, other = questions(1), questions(2)
    assert one.held_out == other.held_out
    assert all(parse(question.text).held_out for question in one.held_out)
    drawn = one.draw(50)
    assert drawn != other.draw(50)
    assert not any(parse(question.text).held_out for question in drawn)


@pytest.mark.parametrize(
    ("response", "finish_reason", "reward"),
    [
        ("answer: {}<|end|>", "stop", 1.0),
        ("answer: {}1<|end|>", "stop", 0.0),
        ("answer: {}", "length", 0.0),
    ],
)
def test_only_a_correct_finished_answer_is_rewarded(
    response: str, finish_reason: FinishReason, reward: float
) -> None:
    asked = questions()
    question = asked.held_out[0]
    text = response.format(parse(question.text).answer)
    token_ids = AutoTokenizer.from_pretrained(SEEDLING).encode(text)
    sample = Sample(
        index=0,
        token_ids=np.array(token_ids),
        logprobs=np.zeros(len(token_ids), dtype=np.float32),
        text=None,
        finish_reason=finish_reason,
        versions=(),
    )
    assert asked.reward(question, sample) == reward


@pytest.mark.slow
def test_learner_makes_rewarded_responses_more_likely() -> None:
    learner = Learner(1e-4)
    group = TrainingGroup(
        prompt=torch.arange(5), responses=(torch.arange(10, 16), torch.arange(20, 26))
    )
    before = [logprobs.sum() for logprobs in group_logprobs(learner.model, group).split()]
    learner.gradients([group], [torch.tensor([1.0, 0.0])])
    learner.update()
    after = [logprobs.sum() for logprobs in group_logprobs(learner.model, group).split()]
    assert after[0] > before[0]
    assert after[1] < before[1]


def test_batch_of_equal_rewards_changes_nothing() -> None:
    learner = Learner(1e-4)
    before = learner.weights()
    group = TrainingGroup(prompt=torch.arange(5), responses=(torch.arange(3), torch.arange(4)))
    learner.gradients([group, group], [torch.ones(2), torch.zeros(2)])
    learner.update()
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.weights().items())


def test_published_tensors_have_the_names_of_the_checkpoint() -> None:
    weights = Learner(1e-4).weights()
    stored = Qwen3ForCausalLM.from_pretrained(SEEDLING, dtype=torch.bfloat16)
    assert weights.keys() == dict(stored.named_parameters()).keys()
    for name, parameter in stored.named_parameters():
        assert torch.equal(weights[name], parameter), name


def test_too_few_steps_are_refused_before_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["grpo", "--steps", "10"])
    with pytest.raises(SystemExit):
        demo.main()
    assert "--steps must be at least 20" in capsys.readouterr().err

"""The example that trains an agent: its episodes and the loop."""

import asyncio
import sys
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from coppice import AsyncRollouts
from examples.agent_training.__main__ import TEMPLATE, main
from examples.agent_training.episodes import TERMS, Episodes, held_out
from examples.agent_training.loop import AgentStep, Loop
from examples.agent_training.picture import draw
from examples.grpo.history import compute_gain
from examples.grpo.learner import Learner
from examples.grpo.server import serving
from examples.grpo.stopwatch import PARTS
from tests.examples.demos import run_demo

ROOT = Path(__file__).parents[2]


def test_held_out_problems_are_fixed_and_never_trained_on() -> None:
    problems = held_out(8)
    assert problems == held_out(8)
    assert all(problem.held_out and len(problem.terms) in TERMS for problem in problems)
    assert len(problems) == 8


def step(number: int, reward: float) -> AgentStep:
    return AgentStep(
        number=number,
        held_out_reward=reward,
        training_reward=reward,
        mean_tokens=30.0,
        p95_tokens=60.0,
        versions_behind=0.0,
        seconds=dict.fromkeys(PARTS, 0.5),
        tool_calls=1.5,
        tokens_forwarded=100,
        tokens_by_turn=300,
    )


def test_training_is_plotted(tmp_path: Path) -> None:
    steps = [step(number, 0.5 + 0.01 * number) for number in range(1, 21)]
    draw(steps, compute_gain(steps), tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_too_few_steps_are_refused_before_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["agent_training", "--steps", "10"])
    with pytest.raises(SystemExit):
        main()
    assert "--steps must be at least 20" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.exhaustive
def test_steps_train_and_publish_weights(tmp_path: Path) -> None:
    async def run(url: str) -> tuple[list[AgentStep], list[str]]:
        async with AsyncRollouts(url) as rollouts, AsyncOpenAI(base_url=url, api_key="-") as client:
            episodes, learner = Episodes(rollouts, client), Learner(1e-4)
            loop = Loop(rollouts, episodes, learner, seed=1, groups=2, num_held_out=2)
            steps = [step async for step in loop.steps(2)]
            [[after]] = await episodes.run(held_out(1), 1)
            spans = (
                span
                for group in after.groups
                if group.tree
                for s in group.tree.segments
                for span in s.versions
            )
            return steps, [span.version for span in spans]

    arguments = ("--engine.chat-template", str(TEMPLATE))
    with serving(tmp_path, cpu_threads=1, seed=1, arguments=arguments) as url:
        steps, versions = asyncio.run(run(url))
    assert [step.number for step in steps] == [1, 2]
    assert all(0 < step.tokens_forwarded < step.tokens_by_turn for step in steps)
    assert set(versions) == {"step-2"}


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.exhaustive
def test_example_learns(tmp_path: Path) -> None:
    found, _ = run_demo("examples.agent_training", tmp_path)
    steps = [AgentStep(**each) for each in found]
    assert compute_gain(steps).learned
    assert steps[-1].tool_calls > steps[0].tool_calls
    assert (tmp_path / "demo-agent.png").read_bytes().startswith(b"\x89PNG")

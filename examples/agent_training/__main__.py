"""`make demo-agent`: trains a policy that calls a tool, through agent sessions.

    python -m examples.agent_training [--seed 1] [--steps 30] [--out build/demo-agent]

The exit status is 1 if the held-out reward has not risen significantly.
"""

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path

import torch
from openai import AsyncOpenAI
from tqdm import tqdm

from coppice import AsyncRollouts
from examples.agent_training.episodes import Episodes
from examples.agent_training.loop import AgentStep, Loop
from examples.agent_training.picture import draw
from examples.grpo.history import WINDOW, compute_gain, save, table
from examples.grpo.learner import Learner
from examples.grpo.server import serving

TEMPLATE = Path(__file__).parent / "chat_template.jinja"


def main() -> int:
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    torch.manual_seed(options.seed)
    print("starting the server", file=sys.stderr)
    arguments = ("--engine.chat-template", str(TEMPLATE))
    with serving(options.out, cpu_threads=cores, seed=options.seed, arguments=arguments) as url:
        steps = asyncio.run(_train(url, options))
    save(steps, options.out / "steps.json")
    gain = compute_gain(steps)
    draw(steps, gain, options.out / "demo-agent.png")
    print(f"\n{table(steps)}\n\n{gain}")
    saved = sum(step.tokens_by_turn for step in steps) / sum(s.tokens_forwarded for s in steps)
    print(f"tokens forwarded, one row per turn / trees: {saved:.1f}")
    print(f"{time.monotonic() - began:.0f} s in all; picture: {options.out / 'demo-agent.png'}")
    return 0 if gain.learned else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains the seedling to call a calculator.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--groups", type=int, default=8, help="training groups per step")
    parser.add_argument("--held-out", type=int, default=32, help="held-out sessions per step")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--out", type=Path, default=Path("build/demo-agent"))
    options = parser.parse_args()
    if options.steps < 2 * WINDOW:
        parser.error(f"--steps must be at least {2 * WINDOW}: the last {WINDOW} are compared")
    return options


async def _train(url: str, options: argparse.Namespace) -> list[AgentStep]:
    steps = []
    async with (
        AsyncRollouts(url) as rollouts,
        AsyncOpenAI(base_url=url, api_key="of each session", timeout=120) as client,
    ):
        loop = Loop(
            rollouts,
            Episodes(rollouts, client),
            Learner(options.learning_rate),
            seed=options.seed,
            groups=options.groups,
            num_held_out=options.held_out,
        )
        with tqdm(total=options.steps, unit="step") as bar:
            async for step in loop.steps(options.steps):
                steps.append(step)
                bar.set_postfix_str(f"held-out reward {step.held_out_reward:.2f}")
                bar.update()
    return steps


if __name__ == "__main__":
    sys.exit(main())

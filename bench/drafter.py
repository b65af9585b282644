"""What training a drafter brings back after a policy update, and what it costs who is served.

    python -m examples.seedling.drafter --out build/drafter/fitted
    python -m bench.harness.retaught --out build/drafter/other
    python -m bench.drafter

The drafter was fitted to the seedling. Then the seedling is replaced, over HTTP and under running
samples, by one that writes in another notation. The first curve is with training, the second
without. What training costs is the time of the same rollouts with the trainer running and with it
stopped (SIGSTOP), in turn.

The engine computes with one thread, so that one core is left, as many are on a machine with a GPU.
"""

import argparse
import asyncio
import random
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path

import psutil
import uvloop

from bench.harness.pairs import Pairs, in_turn
from bench.harness.record import Record, Row
from bench.harness.recovery import GOAL_SHARE, Curve, Point, picture
from bench.harness.served import served
from coppice import AsyncRollouts
from coppice.wire.drafter import DrafterAnswer
from engine.settings import EngineSettings, SpeculationSettings
from examples.seedling.arithmetic import draw

BUILD = Path("build") / "drafter"
GROUPS, N, MAX_TOKENS = 4, 8, 200
BEFORE_SECONDS, WITHOUT_SECONDS = 30.0, 50.0
GOAL_SECONDS, GOAL_FALL, GOAL_LOST = 300.0, 1 / 3, 0.05
WINDOW_SECONDS = 10.0
ROUNDS = 12


@asynccontextmanager
async def drafted(*, training: bool) -> AsyncIterator[AsyncRollouts]:
    with tempfile.TemporaryDirectory() as folder:
        speculation = SpeculationSettings(
            mode="drafter",
            longest_draft=4,
            drafter=BUILD / "fitted",
            drafter_directory=Path(folder),
            drafter_training=training,
            drafter_busy_share=1.0,
        )
        settings = EngineSettings(cpu_threads=1, max_sequences=64)
        async with (
            served(settings, speculation=speculation) as (_, url),
            AsyncRollouts(url, timeout=600) as rollouts,
        ):
            yield rollouts


class Traffic:
    """Rollouts of fresh prompts, without end."""

    def __init__(self, rollouts: AsyncRollouts) -> None:
        self._rollouts, self._rng = rollouts, random.Random(7)

    def prompts(self) -> list[str]:
        return [draw(self._rng, held_out=True).prompt for _ in range(GROUPS)]

    async def run(self) -> None:
        while True:
            await self._rollouts.rollout(self.prompts(), n=N, max_tokens=MAX_TOKENS)


async def curve(*, training: bool, seconds: float) -> Curve:
    async with drafted(training=training) as rollouts:
        traffic = asyncio.create_task(Traffic(rollouts).run())
        found = [p async for p in _windows(rollouts, BEFORE_SECONDS, -BEFORE_SECONDS)]
        await rollouts.publish_weights("other-notation", BUILD / "other" / "model.safetensors")
        async for point in _windows(rollouts, seconds, 0.0):
            found.append(point)
            if _over(Curve(points=found)):
                break
        traffic.cancel()
        await asyncio.gather(traffic, return_exceptions=True)
    return Curve(points=found)


def _over(so_far: Curve) -> bool:
    """Five windows after it is back."""
    back = so_far.recovered_seconds
    return back is not None and so_far.points[-1].seconds >= back + 5 * WINDOW_SECONDS


async def _windows(rollouts: AsyncRollouts, seconds: float, offset: float) -> AsyncIterator[Point]:
    began, before = time.monotonic(), await rollouts.drafter()
    while time.monotonic() - began < seconds:
        await asyncio.sleep(WINDOW_SECONDS)
        now = await rollouts.drafter()
        drafted, accepted = _since(before, now)
        if drafted:
            point = Point(
                seconds=time.monotonic() - began + offset,
                acceptance=accepted / drafted,
                drafts=drafted,
                drafter=now.serving,
            )
            print(point, flush=True)
            yield point
        before = now


def _since(before: DrafterAnswer, now: DrafterAnswer) -> tuple[int, int]:
    known = {(p.drafter, p.weights): (p.first_drafted, p.first_accepted) for p in before.acceptance}
    drafted = accepted = 0
    for pair in now.acceptance:
        was = known.get((pair.drafter, pair.weights), (0, 0))
        drafted += pair.first_drafted - was[0]
        accepted += pair.first_accepted - was[1]
    return drafted, accepted


async def cost(rounds: int) -> Pairs:
    """Seconds of the same amount of work, with the trainer stopped and with it running."""
    stopped: list[float] = []
    running: list[float] = []
    async with drafted(training=True) as rollouts:
        traffic, trainer = Traffic(rollouts), _trainer()

        async def timed(with_signal: signal.Signals, seconds: list[float]) -> None:
            trainer.send_signal(with_signal)
            prompts, began = traffic.prompts(), time.perf_counter()
            await rollouts.rollout(prompts, n=N, max_tokens=MAX_TOKENS, ignore_eos=True)
            seconds.append(time.perf_counter() - began)

        for _ in range(4):
            await timed(signal.SIGCONT, [])
        await in_turn(
            [
                lambda: timed(signal.SIGSTOP, stopped),
                lambda: timed(signal.SIGCONT, running),
            ],
            rounds=rounds,
        )
        trainer.send_signal(signal.SIGCONT)
    return Pairs(a=stopped, b=running)


def _trainer() -> psutil.Process:
    children = psutil.Process().children(recursive=True)
    [found] = [child for child in children if "engine.drafter.training" in child.cmdline()]
    return found


def recovery(with_it: Curve, without: Curve) -> Record:
    fall = 1 - without.after / without.before
    back = with_it.recovered_seconds
    return Record(
        name="drafter_recovery",
        bench="drafter",
        claim="A drafter fitted to one policy, after an update that it has not seen: the share of "
        "drafts whose first token is accepted, with training in the background and without. The "
        "seedling, on one thread of two cores.",
        rows=[
            Row(
                what="before the update, and right after it, without training",
                value=f"{without.before:.3f}, {without.after:.3f}",
                goal=f"falls by {GOAL_FALL:.0%} or more",
                verdict="met" if fall >= GOAL_FALL else "missed",
            ),
            Row(
                what=f"{without.points[-1].seconds:.0f} s after it, without training",
                value=f"{without.last:.3f}",
            ),
            Row(
                what="before the update, and right after it, with training",
                value=f"{with_it.before:.3f}, {with_it.after:.3f}",
            ),
            Row(
                what=f"back at {GOAL_SHARE:.0%} of what it was, with training",
                value=f"after {back:.0f} s" if back else f"not in {GOAL_SECONDS:.0f} s",
                goal=f"within {GOAL_SECONDS:.0f} s",
                verdict="met" if back and back <= GOAL_SECONDS else "missed",
            ),
            Row(
                what=f"{with_it.points[-1].seconds:.0f} s after it, with training",
                value=f"{with_it.last:.3f}",
            ),
        ],
        raw={
            "with": [asdict(point) for point in with_it.points],
            "without": [asdict(point) for point in without.points],
        },
    )


def lost(pairs: Pairs) -> Record:
    ratio = pairs.ratio()
    return Record(
        name="drafter_cost",
        bench="drafter",
        claim="What training a drafter in the background, and trying what it makes, takes from an "
        "engine with running work. The seedling, on one thread of two cores.",
        rows=[
            Row(
                what="tokens a second, training / training stopped",
                value=f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]",
                goal=f"at least {1 - GOAL_LOST:.2f}",
                verdict=ratio.verdict(1 - GOAL_LOST),
            )
        ],
        raw={"seconds_stopped": pairs.a, "seconds_running": pairs.b},
    )


async def recovered(seconds: float) -> Record:
    without = await curve(training=False, seconds=WITHOUT_SECONDS)
    return recovery(await curve(training=True, seconds=seconds), without)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("recovery", "cost"), help="left out: both")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=GOAL_SECONDS)
    asked = parser.parse_args()
    if asked.only != "cost":
        result = uvloop.run(recovered(asked.seconds))
        result.show()
        print(f"\nwrote {result.write().name} and {picture(result.raw).name}")
    if asked.only != "recovery":
        result = lost(uvloop.run(cost(asked.rounds)))
        result.show()
        print(f"\nwrote {result.write().name}")


if __name__ == "__main__":
    main()

"""Benchmark: how a drafter's acceptance recovers by training after a policy update.

    python -m examples.seedling.drafter --out build/drafter/fitted
    python -m bench.harness.policy_shift --out build/drafter/other
    python -m bench.drafter_recovery

The drafter was fitted to the seedling. Then the seedling is replaced, over HTTP and while samples
run, by one that writes in another notation. The first curve is with training, the second without,
for the same time.
"""

import argparse
import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import asdict

import uvloop

from bench.harness.drafter_server import BUILD, Traffic, drafter_server
from bench.harness.record import Record, Row, add_out
from bench.harness.recovery_plot import RECOVERED_SHARE, Curve, Point, picture
from coppice import AsyncRollouts
from coppice.wire.weights import DrafterAnswer

BEFORE_SECONDS = 30.0
GOAL_SECONDS, MIN_FALL = 300.0, 1 / 3
WINDOW_SECONDS = 10.0


async def curve(*, training: bool, seconds: float) -> Curve:
    async with drafter_server(training=training) as rollouts:
        traffic = asyncio.create_task(Traffic(rollouts).run())
        found = [p async for p in _windows(rollouts, BEFORE_SECONDS, -BEFORE_SECONDS)]
        await rollouts.publish_weights("other-notation", BUILD / "other" / "model.safetensors")
        async for point in _windows(rollouts, seconds, 0.0):
            found.append(point)
            if _is_recovered(Curve(points=found)):
                break
        traffic.cancel()
        await asyncio.gather(traffic, return_exceptions=True)
    return Curve(points=found)


def _is_recovered(so_far: Curve) -> bool:
    """True if acceptance recovered at least five windows ago, so that measuring can end."""
    back = so_far.recovered_seconds
    return back is not None and so_far.points[-1].seconds >= back + 5 * WINDOW_SECONDS


async def _windows(rollouts: AsyncRollouts, seconds: float, offset: float) -> AsyncIterator[Point]:
    began, before = time.monotonic(), await rollouts.drafter()
    while time.monotonic() - began < seconds:
        await asyncio.sleep(WINDOW_SECONDS)
        now = await rollouts.drafter()
        num_drafted, accepted = _since(before, now)
        if num_drafted:
            point = Point(
                seconds=time.monotonic() - began + offset,
                acceptance=accepted / num_drafted,
                drafts=num_drafted,
                drafter=now.serving,
            )
            print(point, flush=True)
            yield point
        before = now


def _since(before: DrafterAnswer, now: DrafterAnswer) -> tuple[int, int]:
    known = {
        (p.drafter, p.weights): (p.num_drafts, p.num_first_tokens_accepted)
        for p in before.acceptance
    }
    num_drafted = accepted = 0
    for pair in now.acceptance:
        was = known.get((pair.drafter, pair.weights), (0, 0))
        num_drafted += pair.num_drafts - was[0]
        accepted += pair.num_first_tokens_accepted - was[1]
    return num_drafted, accepted


def recovery(with_it: Curve, without: Curve) -> Record:
    fall = 1 - without.after / without.before
    back = with_it.recovered_seconds
    return Record(
        name="drafter_recovery",
        claim="A drafter fitted to one policy, after an update that it was not trained on: the "
        "share of drafts whose first token is accepted, with training in the background and "
        "without. The bundled model, on one thread of two cores.",
        rows=[
            Row(
                what="acceptance before and right after the update, without training",
                value=f"{without.before:.3f}, {without.after:.3f}",
                goal=f"falls by {MIN_FALL:.0%} or more",
                verdict="met" if fall >= MIN_FALL else "missed",
            ),
            Row(
                what=f"{without.points[-1].seconds:.0f} s after the update, without training",
                value=f"{without.last:.3f}",
            ),
            Row(
                what="acceptance before and right after the update, with training",
                value=f"{with_it.before:.3f}, {with_it.after:.3f}",
            ),
            Row(
                what=f"acceptance recovered to {RECOVERED_SHARE:.0%} of what it was, with training",
                value=f"after {back:.0f} s" if back else f"not in {GOAL_SECONDS:.0f} s",
                goal=f"within {GOAL_SECONDS:.0f} s",
                verdict="met" if back and back <= GOAL_SECONDS else "missed",
            ),
            Row(
                what=f"{with_it.points[-1].seconds:.0f} s after the update, with training",
                value=f"{with_it.last:.3f}",
            ),
        ],
        raw={
            "with": [asdict(point) for point in with_it.points],
            "without": [asdict(point) for point in without.points],
        },
    )


async def recovery_seconds(seconds: float) -> Record:
    with_it = await curve(training=True, seconds=seconds)
    as_long = with_it.points[-1].seconds
    return recovery(with_it, await curve(training=False, seconds=as_long))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=GOAL_SECONDS)
    add_out(parser)
    arguments = parser.parse_args()
    result = uvloop.run(recovery_seconds(arguments.seconds))
    result.show()
    print(f"\nwrote {result.write(arguments.out).name} and {picture(result.raw).name}")


if __name__ == "__main__":
    main()

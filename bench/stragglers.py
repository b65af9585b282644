"""Benchmark: cost of waiting for a group's longest samples, and of not waiting.

First, groups of 16 that finish after 8 samples alternate with groups that finish completely. Then
runs of 20 steps, each with new weights and a deadline that cuts off the longest samples; cut
samples are discarded, or resumed in the next step. bench/length_bias.py measures the effect on
lengths.
"""

import argparse
import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from bench.harness.in_process_service import running_service
from bench.harness.paired_runs import Pairs, alternate
from bench.harness.record import Record, Row, add_out
from coppice import AsyncRollouts, Finish, GroupRequest, Prompt, Sample
from engine.settings import EngineSettings
from examples.seedling.arithmetic import draw

N, K, GROUPS = 16, 8, 8
STEPS, DEADLINE_SHARE = 20, 0.3
MAX_TOKENS = 400
SEEDLING = Path(EngineSettings().model)


@dataclass(slots=True)
class WaitTimes:
    """Seconds of each round, when waiting for enough or for all samples of a group."""

    enough: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Run:
    """Totals of a simulated run: tokens and number of finished samples, and seconds."""

    tokens: int = 0
    num_samples: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


class Prompts:
    """Source of prompts: held-out problems, new ones on each call."""

    def __init__(self) -> None:
        self._rng = random.Random(7)

    def next(self, number: int) -> list[str]:
        return [draw(self._rng, held_out=True).prompt for _ in range(number)]


async def wait_times(rollouts: AsyncRollouts, rounds: int) -> WaitTimes:
    waits, prompts = WaitTimes(), Prompts()

    async def timed(finish: Finish | None) -> float:
        asked, began = prompts.next(GROUPS), time.perf_counter()
        await rollouts.rollout(asked, n=N, max_tokens=MAX_TOKENS, finish=finish)
        return time.perf_counter() - began

    async def enough() -> None:
        waits.enough.append(await timed(Finish(num_samples=K)))

    async def whole() -> None:
        waits.whole.append(await timed(None))

    await alternate([enough, whole], rounds=rounds)
    del waits.enough[0], waits.whole[0]  # the warm-up
    return waits


async def simulated_run(rollouts: AsyncRollouts, seconds_each: float, *, continued: bool) -> Run:
    """Simulate training steps that use only samples finished by a deadline.

    Cut samples are resumed in the next step, or discarded. The remaining capacity goes to new
    prompts.
    """
    run, prompts = Run(), Prompts()
    label = f"{'with' if continued else 'without'}-{time.monotonic_ns()}"
    carried: list[tuple[str, tuple[Sample, ...]]] = []
    for step in range(STEPS):
        await rollouts.publish_weights(f"{label}-{step}", SEEDLING, mode="keep")
        places = GROUPS * N - sum(len(samples) for _, samples in carried)
        fresh = prompts.next(places // N)
        asked = [*[_group(prompt, len(samples)) for prompt, samples in carried]]
        asked += [_group(prompt, N) for prompt in fresh]
        began = time.perf_counter()
        result = await rollouts.rollout(
            asked,
            max_tokens=MAX_TOKENS,
            finish=Finish(deadline_seconds=seconds_each),
            continue_from=[samples for _, samples in carried],
        )
        run.seconds += time.perf_counter() - began
        ended = [s for g in result.groups for s in g.samples if s.finish_reason == "stop"]
        run.num_samples += len(ended)
        run.tokens += sum(len(sample.token_ids) for sample in ended)
        if continued:
            texts = [*[prompt for prompt, _ in carried], *fresh]
            pairs = zip(texts, result.groups, strict=True)
            begun = [(t, tuple(s for s in g.unfinished if len(s.token_ids))) for t, g in pairs]
            carried = [(text, samples) for text, samples in begun if samples]
    return run


def _group(prompt: str, n: int) -> GroupRequest:
    return GroupRequest(prompt=Prompt(text=prompt), n=n)


async def measure(model: str, rounds: int) -> tuple[WaitTimes, float, Run, Run]:
    settings = EngineSettings(model=model, seed=0, max_sequences=GROUPS * N)
    async with running_service(settings) as (_, url), AsyncRollouts(url, timeout=600) as rollouts:
        waits = await wait_times(rollouts, rounds)
        deadline = DEADLINE_SHARE * statistics.median(waits.whole)
        without = await simulated_run(rollouts, deadline, continued=False)
        with_it = await simulated_run(rollouts, deadline, continued=True)
    return waits, deadline, without, with_it


def record(waits: WaitTimes, deadline: float, without: Run, with_it: Run) -> Record:
    ratio = Pairs(a=waits.whole, b=waits.enough).ratio()
    runs = (("discarded", without), ("continued", with_it))
    return Record(
        name="stragglers",
        claim=f"{GROUPS} groups of {N}: until {K} of each have finished, and until all have; and "
        f"{STEPS} steps with a deadline and new weights each, with and without continuing the "
        "unfinished samples.",
        rows=[
            Row(
                what=f"time, all {N} / first {K}",
                value=f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]",
            ),
            *(
                Row(
                    what=f"{STEPS} steps of {deadline:.2f} s, unfinished samples {name}",
                    value=f"{run.tokens_per_second:,.0f} tokens/s of finished samples, "
                    f"{run.num_samples:,} samples of {run.tokens / max(run.num_samples, 1):.1f} "
                    "tokens",
                )
                for name, run in runs
            ),
            Row(
                what="tokens of finished samples, continued / discarded",
                value=f"{with_it.tokens_per_second / without.tokens_per_second:.2f} (one run each)",
            ),
        ],
        raw={"enough": waits.enough, "whole": waits.whole},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=EngineSettings().model)
    parser.add_argument("--rounds", type=int, default=9)
    add_out(parser)
    arguments = parser.parse_args()
    result = record(*uvloop.run(measure(arguments.model, arguments.rounds)))
    result.show()
    print(f"\nwrote {result.write(arguments.out).name}")


if __name__ == "__main__":
    main()

"""Benchmark: how much drafter training in the background slows down rollouts.

    python -m examples.seedling.drafter --out build/drafter/fitted
    python -m bench.drafter_training_cost

The time of the same rollouts is measured with the trainer running and with it stopped (SIGSTOP), in
turn: right after its start, when there is most to learn, and after it has converged.
"""

import argparse
import signal
import time
from dataclasses import asdict, dataclass

import psutil
import uvloop

from bench.harness.drafter_server import Traffic, drafter_server
from bench.harness.paired_runs import Pairs, Ratio, alternate
from bench.harness.record import Record, Row, add_out
from engine.drafter.trainer.training_loop import CONVERGED_DUTY_CYCLE

MAX_LOSS = 0.05
SETTLING_SECONDS = 180.0
ROUNDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Times of the same rollouts, in pairs with the drafter's trainer stopped and running.

    `learning` is measured right after the trainer's start, `settled` after convergence.
    """

    learning: Pairs
    settled: Pairs


async def cost(rounds: int) -> Cost:
    async with drafter_server(training=True) as rollouts:
        traffic, trainer = Traffic(rollouts), _trainer()
        learning = await _compared(traffic, trainer, rounds // 2)
        await _until_settled(traffic, trainer)
        return Cost(learning=learning, settled=await _compared(traffic, trainer, rounds))


async def _compared(traffic: Traffic, trainer: psutil.Process, rounds: int) -> Pairs:
    stopped: list[float] = []
    running: list[float] = []

    async def timed(with_signal: signal.Signals, seconds: list[float]) -> None:
        trainer.send_signal(with_signal)
        seconds.append(await traffic.timed())

    try:
        await alternate(
            [
                lambda: timed(signal.SIGSTOP, stopped),
                lambda: timed(signal.SIGCONT, running),
            ],
            rounds=rounds,
        )
    finally:
        trainer.send_signal(signal.SIGCONT)
    return Pairs(a=stopped[1:], b=running[1:])


async def _until_settled(traffic: Traffic, trainer: psutil.Process) -> None:
    """Wait until the drafter's trainer has converged, which lowers its share of CPU time."""
    began = time.monotonic()
    while time.monotonic() - began < SETTLING_SECONDS:
        before = trainer.cpu_times().user
        seconds = await traffic.timed()
        share = (trainer.cpu_times().user - before) / seconds
        print(f"{share:.2f} of a processor for training", flush=True)
        if share < CONVERGED_DUTY_CYCLE + 0.1:
            return
    raise TimeoutError(f"acceptance still rises after {SETTLING_SECONDS:.0f} s")


def _trainer() -> psutil.Process:
    children = psutil.Process().children(recursive=True)
    [found] = [child for child in children if "engine.drafter.trainer" in child.cmdline()]
    return found


def loss_ratio(cost: Cost) -> Record:
    parts = {
        "after the drafter has converged": cost.settled,
        "while acceptance still rises": cost.learning,
    }
    return Record(
        name="drafter_training_cost",
        claim="Cost of background drafter training and of its A/B tests for a loaded engine. The "
        "bundled model, on one thread of two cores.",
        rows=[_row(when, pairs.ratio()) for when, pairs in parts.items()],
        raw={when: asdict(pairs) for when, pairs in parts.items()},
    )


def _row(when: str, ratio: Ratio) -> Row:
    return Row(
        what=f"tokens/s, training / training stopped, {when}",
        value=f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]",
        goal=f"at least {1 - MAX_LOSS:.2f}",
        verdict=ratio.verdict(1 - MAX_LOSS),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    add_out(parser)
    arguments = parser.parse_args()
    result = loss_ratio(uvloop.run(cost(arguments.rounds)))
    result.show()
    print(f"\nwrote {result.write(arguments.out).name}")


if __name__ == "__main__":
    main()

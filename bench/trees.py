"""Benchmark: savings of tree rollouts against independent samples.

Both have the same number of leaves, of the same length. Two services run concurrently, identical
except for shared-prefix attention. They alternate between trees and independent samples, so one is
idle while the other works. Measured are sampled tokens, prompt tokens not found in the cache, and
the time of a request.
"""

import argparse
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import uvloop

from bench.harness.in_process_service import computed_prompt_tokens, running_service
from bench.harness.paired_runs import Pairs, alternate
from bench.harness.record import Record, Row, add_out
from coppice import AsyncRollouts, Branching
from coppice.credit import effective_leaves
from coppice.rollout_results import RolloutResult
from engine.attention.settings import AttentionSettings, SharedPrefixMode
from engine.settings import EngineSettings

GROUPS, PROMPT, LEAVES, TOKENS, INTERVAL = 4, 200, 16, 256, 64
BRANCHING = Branching(mode="interval", interval=INTERVAL, max_depth=4, max_leaves=LEAVES)
MODES: tuple[SharedPrefixMode, ...] = ("off", "auto")
CACHE_BYTES = 2**28


@dataclass(slots=True)
class Arm:
    """Measurements of each run of one arm: trees, or independent samples."""

    seconds: list[float] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)
    leaves: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    attention: SharedPrefixMode
    tree: Arm
    flat: Arm

    def rows(self) -> list[Row]:
        ratio = Pairs(a=self.flat.seconds, b=self.tree.seconds).ratio()
        times = [statistics.median(arm.seconds) for arm in (self.tree, self.flat)]
        return [
            Row(
                what=f"time, flat / tree, shared-prefix attention {self.attention}",
                value=f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]",
            ),
            Row(
                what=f"time, shared-prefix attention {self.attention}",
                value=f"tree {times[0]:.1f}, flat {times[1]:.1f} s",
            ),
        ]


def prompts(number: int) -> list[list[int]]:
    """Prompts that differ in each run, so that none of them hits the prefix cache."""
    return [
        [5 + (number + i) % 64, 5 + number // 64 % 64, *[12 + i % 7] * (PROMPT - 2)]
        for i in range(GROUPS)
    ]


async def measure(model: str, rounds: int) -> list[Measured]:
    settings = EngineSettings(
        model=model, seed=0, max_sequences=GROUPS * LEAVES, cache_bytes=CACHE_BYTES
    )
    found = [Measured(attention=mode, tree=Arm(), flat=Arm()) for mode in MODES]
    numbers = iter(range(1, 10**6))
    async with AsyncExitStack() as stack:
        arms: list[Callable[[], Awaitable[None]]] = []
        for each in found:
            attention = AttentionSettings(shared_prefix=each.attention)
            _, url = await stack.enter_async_context(running_service(settings, attention))
            rollouts = await stack.enter_async_context(AsyncRollouts(url, timeout=600))
            arms += [asking(rollouts, each, kind, numbers) for kind in ("tree", "flat")]
        await alternate(arms, rounds=rounds)
    for arm in (arm for each in found for arm in (each.tree, each.flat)):
        for values in (arm.seconds, arm.sampled, arm.computed, arm.leaves):
            del values[0]  # the warm-up
    return found


def asking(
    rollouts: AsyncRollouts, measured: Measured, kind: str, numbers: Iterator[int]
) -> Callable[[], Awaitable[None]]:
    arm: Arm = getattr(measured, kind)

    async def ask() -> None:
        given = prompts(next(numbers))
        before, began = computed_prompt_tokens(), time.perf_counter()
        if kind == "tree":
            result = await rollouts.rollout(
                given, max_tokens=TOKENS, ignore_eos=True, branching=BRANCHING
            )
        else:
            result = await rollouts.rollout(given, max_tokens=TOKENS, ignore_eos=True, n=LEAVES)
        arm.seconds.append(time.perf_counter() - began)
        arm.computed.append(computed_prompt_tokens() - before)
        arm.sampled.append(result.usage.num_generated_tokens)
        arm.leaves.append(independent(result))

    return ask


def independent(result: RolloutResult) -> float:
    """Effective number of independent samples in a rollout's first group."""
    group = result.groups[0]
    return float(len(group.samples)) if group.tree is None else effective_leaves(group.tree)


def speedup_rows(what: str, without: Arm, shared: Arm) -> Row:
    ratio = Pairs(a=without.seconds, b=shared.seconds).ratio()
    return Row(
        what=f"time of {what}, without shared-prefix attention / with it",
        value=f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]",
    )


def record(without: Measured, shared: Measured) -> Record:
    tree, flat = shared.tree, shared.flat  # vLLM's counters cover only the engine started last

    def both(what: str, one: list[float], other: list[float]) -> Row:
        medians = [f"{statistics.median(side):,.1f}" for side in (one, other)]
        return Row(what=what, value=f"tree {medians[0]}, flat {medians[1]}")

    return Record(
        name="trees",
        claim=f"{GROUPS} groups of {LEAVES} leaves, {TOKENS} tokens each, as trees that split "
        f"every {INTERVAL} tokens and as plain samples, with shared-prefix attention and without, "
        "all four in turn.",
        rows=[
            *without.rows(),
            *shared.rows(),
            speedup_rows("trees", without.tree, shared.tree),
            speedup_rows("plain samples", without.flat, shared.flat),
            both("tokens sampled", [*map(float, tree.sampled)], [*map(float, flat.sampled)]),
            both("prompt tokens prefilled", tree.computed, flat.computed),
            both("effective independent leaves per group", tree.leaves, flat.leaves),
        ],
        raw={
            f"{arm}, {measured.attention}": getattr(measured, arm).seconds
            for measured in (without, shared)
            for arm in ("tree", "flat")
        },
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

"""Benchmark: compares drafters by replaying rollouts recorded without speculation.

Lossless speculation does not change the output distribution. So a recorded text can be replayed
with any drafter, step by step, with the same siblings and waves. No engine runs, and nothing is
timed. `python -m bench.replay.record_traces` records the traces.
"""

import argparse
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from bench.harness.paired_runs import Ratio
from bench.harness.record import RECORDS, Record, Row, add_out
from bench.replay.costs import Costs, LinearCost, MeasuredCost, measured_steps
from bench.replay.drafters import ARCTIC, Drafter, NgramDrafter, StoreDrafter, SuffixDrafter
from bench.replay.replay import Controller, Fixed, Replay, ReplayResult, ThresholdPolicy
from bench.replay.traces import TRACES, Group, Trace
from engine.speculation.calibration import DraftCalibration
from engine.speculation.controller import Controller as Ruling
from engine.speculation.cost import Step, StepCostModel
from kernels.draft_index.store_protocol import ALL_SCOPES, Scope

NUM_FINISHED = (0, 1, 3, 7, 15)
SEER_RESULTS = {0: 1.70, 1: 2.04, 5: 2.32, 15: 2.53}
LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
LONGEST, SEER_LONGEST, RUNNING = 16, 8, 64
LINEAR_COST = LinearCost(fixed=1.0, token=0.02)
RESAMPLES = 2000
MEASURED = RECORDS / "speculation_25m_1.json"
SUFFIX_DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "Arctic, vLLM defaults": lambda: SuffixDrafter(),
    "Arctic, 4x match length": lambda: SuffixDrafter(factor=4.0),
    "Arctic, 4x match length, any probability": lambda: SuffixDrafter(factor=4.0, threshold=0.0),
}
OURS: dict[str, Callable[[], Drafter]] = {
    "ours": lambda: StoreDrafter(),
    "ours, no ageing": lambda: StoreDrafter(ages=False),
    "ours, no history": lambda: StoreDrafter(scopes=frozenset({Scope.SELF, Scope.SIBLINGS})),
    "ours, no siblings": lambda: StoreDrafter(scopes=ALL_SCOPES - {Scope.SIBLINGS}),
    "ours, own tokens only": lambda: StoreDrafter(scopes=frozenset({Scope.SELF})),
}
ALL: dict[str, Callable[[], Drafter]] = {"n-gram 2..4": NgramDrafter, **SUFFIX_DRAFTERS, **OURS}
DRAFTERS_COMPARED = ("n-gram 2..4", *SUFFIX_DRAFTERS, "ours")
CONTROLLERS: dict[str, Callable[[], Controller]] = {
    "drafts up to a probability of 30%": lambda: ThresholdPolicy(0.3),
    "drafts up to a probability of 50%": lambda: ThresholdPolicy(0.5),
    "drafts up to a probability of 70%": lambda: ThresholdPolicy(0.7),
}


def replay_all(
    trace: Trace,
    drafter: Drafter,
    controller: Controller,
    costs: Costs = LINEAR_COST,
    *,
    is_oracle: bool = False,
) -> ReplayResult:
    """Replay all epochs of a trace in order; the weights change after each."""
    replayer = Replay(
        drafter=drafter,
        controller=controller,
        max_running=RUNNING,
        max_draft_tokens=LONGEST,
        costs=costs,
        is_oracle=is_oracle,
    )
    for number, groups in enumerate(trace.epochs):
        replayer.epoch(number, groups)
        drafter.age()
    return replayer.result


def replay_with_finished(trace: Trace, drafter: Callable[[], Drafter], number: int) -> ReplayResult:
    """Replay each response of the first epoch alone, with `number` finished siblings known."""
    result = ReplayResult()
    for index, group in enumerate(trace.epochs[0]):
        for at, response in enumerate(group.responses):
            others = [group.responses[(at + 1 + i) % len(group.responses)] for i in range(number)]
            fresh = drafter()
            add_finished(fresh, b"%d" % index, group.prompt, others)
            one = Replay(
                drafter=fresh,
                controller=Fixed(SEER_LONGEST),
                max_draft_tokens=SEER_LONGEST,
                result=result,
            )
            one.epoch(index, [Group(prompt=group.prompt, responses=(response,))])
    return result


def add_finished(
    drafter: Drafter, group: bytes, prompt: Sequence[int], responses: Sequence[Sequence[int]]
) -> None:
    """Add finished responses to a drafter as known texts."""
    for response in responses:
        drafter.end(drafter.begin(b"%s/0" % group, prompt), response)


def accepted_length_ratio(one: ReplayResult, other: ReplayResult) -> Ratio:
    """Ratio of two replays' mean accepted lengths, with a bootstrap interval over groups."""
    groups = sorted(one.by_group)
    chance = random.Random(0)

    def ratio(drawn: Sequence[bytes]) -> float:
        sums = [
            [sum(result.by_group[group][i] for group in drawn) for i in (0, 1)]
            for result in (one, other)
        ]
        return (sums[0][1] / sums[0][0]) / (sums[1][1] / sums[1][0])

    drawn = sorted(ratio(chance.choices(groups, k=len(groups))) for _ in range(RESAMPLES))
    return Ratio(
        median=ratio(groups),
        low=drawn[int(0.025 * RESAMPLES)],
        high=drawn[int(0.975 * RESAMPLES)],
    )


def finished_rows(trace: Trace) -> Iterator[Row]:
    for number in NUM_FINISHED:
        found = {name: replay_with_finished(trace, ALL[name], number) for name in DRAFTERS_COMPARED}
        ours = found["ours"]
        lengths = ", ".join(
            f"{name} {found[name].accepted_length:.2f}" for name in DRAFTERS_COMPARED
        )
        seer = f"; Seer, Table 2 {SEER_RESULTS[number]:.2f}" if number in SEER_RESULTS else ""
        yield Row(
            what=f"T {trace.temperature}, {number} finished siblings: accepted length",
            value=lengths + seer,
        )
        for name in SUFFIX_DRAFTERS:
            ratio = accepted_length_ratio(ours, found[name])
            goal = number >= 4
            yield Row(
                what=f"T {trace.temperature}, {number} finished siblings: ours / {name}",
                value=f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]",
                goal=">= 1.1" if goal else "",
                verdict=ratio.verdict(1.1) if goal else "",
            )


def whole_rows(trace: Trace) -> Iterator[Row]:
    for name, make in ALL.items():
        found = replay_all(trace, make(), Fixed(SEER_LONGEST))
        yield Row(
            what=f"T {trace.temperature}, all epochs, {name}",
            value=f"accepted length {found.accepted_length:.2f}, forward passes saved "
            f"{found.passes_saved:.0%}, draft tokens accepted {found.acceptance:.0%}",
        )


def regret_rows(trace: Trace, steps: Sequence[Step]) -> Iterator[Row]:
    """Table rows: how far draft-length controllers are from the best fixed length and an oracle.

    Time is by a linear cost model and, given `steps`, by an engine's measured costs; only then is
    the engine's own controller included.
    """
    yield from _regret_rows_of(trace, "linear cost model", LINEAR_COST, CONTROLLERS)
    if steps:
        ruling = {
            "the engine's controller": lambda: Ruling(StepCostModel(steps), DraftCalibration())
        }
        costs = MeasuredCost(StepCostModel(steps))
        yield from _regret_rows_of(trace, "measured costs", costs, CONTROLLERS | ruling)


def _regret_rows_of(
    trace: Trace, what: str, costs: Costs, controllers: Mapping[str, Callable[[], Controller]]
) -> Iterator[Row]:
    fixed = {
        length: replay_all(trace, StoreDrafter(), Fixed(length), costs).seconds
        for length in LENGTHS
    }
    best = min(fixed, key=fixed.__getitem__)
    oracle = replay_all(trace, StoreDrafter(), Fixed(LONGEST), costs, is_oracle=True).seconds
    for name, controller in controllers.items():
        seconds = replay_all(trace, StoreDrafter(), controller(), costs).seconds
        yield Row(
            what=f"T {trace.temperature}, {what}, {name}: time",
            value=f"{fixed[0] / seconds:.2f} times as fast as no drafts; takes "
            f"{seconds / fixed[best]:.3f} of the time of the best fixed length ({best}) and "
            f"{seconds / oracle:.3f} of the oracle",
        )


def reliability_rows(trace: Trace) -> Iterator[Row]:
    drafter = StoreDrafter()
    replay_all(trace, drafter, Fixed(LONGEST))
    found = drafter.store.reliability()
    tried, accepted, predicted = (
        each.sum(axis=0) for each in (found.tried, found.accepted, found.predicted)
    )
    yield Row(
        what=f"T {trace.temperature}, acceptance probability, predicted and observed",
        value=f"{found.error():.3f} mean difference over {tried.sum():,} drafted tokens: "
        + ", ".join(
            f"{predicted[i] / tried[i]:.2f}: {accepted[i] / tried[i]:.2f}"
            for i in range(len(tried))
            if tried[i] >= 100
        ),
    )


def longest_context(trace: Trace) -> int:
    groups = [group for groups in trace.epochs for group in groups]
    return max(len(one.prompt) + max(map(len, one.responses)) for one in groups)


def claim(traces: Sequence[Trace], steps: Sequence[Step]) -> str:
    also = ", or what steps of an engine with 25M parameters were measured to take" if steps else ""
    texts = "; ".join(
        f"temperature {trace.temperature}: {trace.num_responses} responses, {trace.num_tokens} "
        f"tokens, {min(trace.entropies):.2f} to {max(trace.entropies):.2f} nats per token"
        for trace in traces
    )
    one = traces[0]
    return (
        "Mean accepted length (tokens per forward pass), on recorded rollouts of the bundled "
        f"model: {len(one.epochs)} epochs of {len(one.epochs[0])} prompts, "
        f"{len(one.epochs[0][0].responses)} samples each, at most {RUNNING} running, "
        f"contexts of up to {max(map(longest_context, traces))} tokens, drafts of at most "
        f"{SEER_LONGEST} tokens unless the row names another length ({texts}). Time is simulated: "
        f"a step costs {LINEAR_COST.fixed:g} and {LINEAR_COST.token:g} more for every token that "
        f"it computes{also}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument(
        "--measured", type=Path, default=MEASURED, help="record with measured step times"
    )
    add_out(parser)
    arguments = parser.parse_args()
    assert ARCTIC.exists(), "scripts/beside.sh arctic installs what ours is compared with"
    traces = [Trace.load(path) for path in sorted(arguments.traces.glob("*.npz"), reverse=True)]
    steps = measured_steps(arguments.measured)
    rows = [
        row
        for trace in traces
        for part in (
            finished_rows(trace),
            whole_rows(trace),
            regret_rows(trace, steps),
            reliability_rows(trace),
        )
        for row in part
    ]
    result = Record(name="drafter_replay", claim=claim(traces, steps), rows=rows)
    result.show()
    print(f"\nwrote {result.write(arguments.out).name}")


if __name__ == "__main__":
    main()

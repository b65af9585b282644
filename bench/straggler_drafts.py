"""Benchmark: gain of sibling drafts for whole batches and for their last samples, by a replay.

Recorded rollouts are replayed in waves of 8 groups of 8 samples, at step times that an engine was
measured to take. No engine runs, and nothing is timed, so the result has no noise: it shows which
part of a gain the draft lengths can reach at all.
"""

import argparse
import json
from collections.abc import Iterator, Sequence

from bench.harness.record import RECORDS, Record, Row, add_out
from bench.replay.costs import MeasuredCost, measured_steps
from bench.replay.drafters import StoreDrafter
from bench.replay.replay import TAIL, Controller, Fixed, Replay, ReplayResult
from bench.replay.traces import TRACES, Group, Trace
from engine.speculation.calibration import DraftCalibration
from engine.speculation.controller import Controller as EngineController
from engine.speculation.cost import Step, StepCostModel

MEASURED = ("speculation_100m_0_6", "speculation_100m_amx_1")
"""Records with measured step times of 100M parameters, each of another processor."""
LONGEST, WAVE = 8, 8
NO_DRAFTS, OURS, ORACLE = "no drafts", "the engine's controller", "oracle"
FIXED = {f"drafts of {length}": length for length in (1, 2, 4)}
MIN_SHARE, MIN_TAIL = 0.5, 1.3


def measured() -> dict[str, list[Step]]:
    """Measured step times by processor."""
    records = [RECORDS / f"{name}.json" for name in MEASURED]
    return {
        json.loads(record.read_text())["machine"]["processor"]: measured_steps(record)
        for record in records
    }


def waves(groups: Sequence[Group]) -> Iterator[list[Group]]:
    """Batches of WAVE groups, with the first WAVE responses of each."""
    for begin in range(0, len(groups), WAVE):
        yield [
            Group(prompt=group.prompt, responses=group.responses[:WAVE])
            for group in groups[begin : begin + WAVE]
        ]


def replay_waves(
    trace: Trace, name: str, steps: Sequence[Step], *, has_history: bool
) -> ReplayResult:
    """Replay all epochs of a trace, with the responses of earlier epochs known or forgotten."""
    result, controller = ReplayResult(), _controller(name, steps)
    drafter = StoreDrafter(max_draft_tokens=LONGEST)
    for number, groups in enumerate(trace.epochs):
        for wave_number, wave in enumerate(waves(groups)):
            one = Replay(
                drafter=drafter,
                controller=controller,
                max_draft_tokens=LONGEST,
                costs=MeasuredCost(StepCostModel(steps)),
                is_oracle=name == ORACLE,
                result=result,
            )
            one.epoch(number * len(trace.epochs[0]) + wave_number, wave)
        drafter.age()
        if not has_history:
            drafter = StoreDrafter(max_draft_tokens=LONGEST)
    return result


def _controller(name: str, steps: Sequence[Step]) -> Controller:
    if name == OURS:
        return EngineController(StepCostModel(steps), DraftCalibration())
    return Fixed({NO_DRAFTS: 0, ORACLE: LONGEST, **FIXED}[name])


def rows_of(
    trace: Trace, processor: str, steps: Sequence[Step], *, has_history: bool
) -> Iterator[Row]:
    """Table rows of all draft lengths, at the step times of a processor."""

    def replay(name: str) -> ReplayResult:
        return replay_waves(trace, name, steps, has_history=has_history)

    plain, oracle = replay(NO_DRAFTS).seconds, replay(ORACLE)
    texts = "known prompts" if has_history else "new prompts"
    for name in (OURS, *FIXED, ORACLE):
        found = oracle if name == ORACLE else replay(name)
        what = f"{processor}, T {trace.temperature}, {texts}, {name}"
        yield _total(what, plain / found.seconds, plain / oracle.seconds, is_ours=name == OURS)
        yield _tail(what, found, is_ours=name == OURS)


def _total(what: str, speedup: float, of_oracle: float, *, is_ours: bool) -> Row:
    least = 1 + MIN_SHARE * (of_oracle - 1)
    return Row(
        what=f"{what}: all steps",
        value=f"{speedup:.2f} times as fast as no drafts",
        goal=f">= {least:.2f}, half of the oracle's gain" if is_ours else "",
        verdict=_verdict(speedup >= least) if is_ours else "",
    )


def _tail(what: str, found: ReplayResult, *, is_ours: bool) -> Row:
    speedup = found.tail.speedup
    return Row(
        what=f"{what}: steps of at most {TAIL} samples",
        value=f"{speedup:.2f} times as fast as no drafts",
        goal=f">= {MIN_TAIL:.2f}" if is_ours else "",
        verdict=_verdict(speedup >= MIN_TAIL) if is_ours else "",
    )


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "missed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_out(parser)
    out = parser.parse_args().out
    traces = [Trace.load(path) for path in sorted(TRACES.glob("*.npz"), reverse=True)]
    rows = [
        row
        for processor, steps in measured().items()
        for trace in traces
        for has_history in (False, True)
        for row in rows_of(trace, processor, steps, has_history=has_history)
    ]
    claim = (
        "Waves of 8 groups of 8 recorded rollouts of the bundled model, replayed with sibling "
        f"drafts of up to {LONGEST} tokens at measured step times of 100M parameters on two cores "
        "of each processor. The oracle sends exactly the draft tokens that will be accepted."
    )
    result = Record(name="straggler_drafts", claim=claim, rows=rows)
    result.show()
    print(f"\nwrote {result.write(out).name}")


if __name__ == "__main__":
    main()

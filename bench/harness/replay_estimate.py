"""Predicts the decode time of a speculation setup by a replay with measured step times."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from bench.harness.speculation_arm import GNU, LONGEST, ROWS
from bench.replay.costs import MeasuredCost
from bench.replay.drafters import StoreDrafter
from bench.replay.replay import Controller, Fixed, Replay
from bench.replay.traces import Group
from engine.speculation.calibration import DraftCalibration
from engine.speculation.controller import Controller as Ruling
from engine.speculation.cost import Step, StepCostModel

LEAST = 2


def cells(runs: Sequence[dict[str, Any]]) -> list[Step]:
    """Median step times by number of samples and of tokens, over the runs of all benchmark arms."""
    found = defaultdict(list)
    for run in runs:
        for rows, context, verified, _, seconds in run["decoded"]:
            found[rows, verified].append((context, seconds))
    return [
        Step(
            running=rows,
            context=round(statistics.mean(context for context, _ in each)),
            verified=verified,
            seconds=statistics.median(seconds for _, seconds in each),
        )
        for (rows, verified), each in sorted(found.items())
        if len(each) >= LEAST
    ]


def predict_seconds(
    name: str,
    prompts: Sequence[Sequence[Sequence[int]]],
    texts: Sequence[Sequence[Sequence[int]]],
    steps: Sequence[Step],
) -> list[float] | None:
    """Predict the seconds of each round's decode steps; None for drafters other than ours."""
    if name in ("ngram", "suffix") or name.endswith(GNU):
        return None
    replayer = Replay(
        drafter=StoreDrafter(max_draft_tokens=LONGEST),
        controller=_controller(name, steps),
        max_running=ROWS,
        max_draft_tokens=LONGEST,
        costs=MeasuredCost(StepCostModel(steps)),
        is_oracle=name == "oracle",
    )
    ends = [0.0]
    for number, (asked, said) in enumerate(zip(prompts, texts, strict=True)):
        replayer.epoch(number, _groups(asked, said))
        ends.append(replayer.result.seconds)
    return [end - begin for begin, end in zip(ends, ends[1:], strict=False)]


def _controller(name: str, steps: Sequence[Step]) -> Controller:
    if name == "ours":
        return Ruling(StepCostModel(steps), DraftCalibration())
    return Fixed(
        int(name.removeprefix("fixed-")) if name.startswith("fixed") else _max_draft_of(name)
    )


def _max_draft_of(name: str) -> int:
    return LONGEST if name == "oracle" else 0


def _groups(prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> list[Group]:
    size = len(texts) // len(prompts)
    return [
        Group(
            prompt=tuple(prompt),
            responses=tuple(map(tuple, texts[number * size : (number + 1) * size])),
        )
        for number, prompt in enumerate(prompts)
    ]

"""Data types for the shapes of CUDA graphs and steps, and recording of step traces."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

UNEVEN = 0


@dataclass(frozen=True, slots=True)
class GraphShape:
    """Shape of an engine step or CUDA graph: total tokens, and tokens per sample.

    `query_len` is the number of tokens per sample, one plus its draft tokens. None: any number per
    sample, as in steps that include prefill. UNEVEN: samples decode with different numbers of draft
    tokens, which no graph supports.
    """

    tokens: int
    query_len: int | None

    @property
    def samples(self) -> int:
        """Number of samples of a step in which every sample has `query_len` tokens."""
        assert self.query_len, self
        return self.tokens // self.query_len

    def __str__(self) -> str:
        return f"{self.samples} x {self.query_len}" if self.query_len else f"{self.tokens} mixed"


def decode(samples: int, query_len: int) -> GraphShape:
    return GraphShape(samples * query_len, query_len)


def mixed(tokens: int) -> GraphShape:
    return GraphShape(tokens, None)


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded step shapes of an engine, run-length encoded, with a description of the recording.

    Plans are made from traces and evaluated on them. A file is JSON: a description, then one row
    per run of equal steps in order: the number of tokens, tokens per sample and steps. Tokens per
    sample is null for steps that include prefill, and 0 for decode steps whose samples had
    different numbers of draft tokens.
    """

    runs: tuple[tuple[GraphShape, int], ...]
    about: Mapping[str, Any] = field(default_factory=dict)

    def counts(self) -> Counter[GraphShape]:
        counted: Counter[GraphShape] = Counter()
        for shape, repeats in self.runs:
            counted[shape] += repeats
        return counted

    def write(self, file: Path) -> None:
        rows = ",\n".join(
            "  " + json.dumps([shape.tokens, shape.query_len, repeats])
            for shape, repeats in self.runs
        )
        about = json.dumps(dict(self.about))
        file.write_text(f'{{"about": {about},\n "steps": [\n{rows}\n]}}\n', encoding="utf-8")


def read_trace(file: Path) -> Trace:
    """Read a trace file; raises ValueError with the reason if it is invalid."""
    try:
        written = json.loads(file.read_text(encoding="utf-8"))
        runs = tuple(
            (GraphShape(tokens, query_len), steps) for tokens, query_len, steps in written["steps"]
        )
        about = dict(written["about"])
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file} is not a step trace: {error!r}") from error
    if not runs or not all(_fits(shape, steps) for shape, steps in runs):
        raise ValueError(f"{file} is not a step trace: it has no rows or an invalid row")
    return Trace(runs, about)


def _fits(shape: GraphShape, steps: Any) -> bool:
    numbers = [shape.tokens, steps, *([] if shape.query_len is None else [shape.query_len])]
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        return False
    return (
        shape.tokens > 0 and steps > 0 and not (shape.query_len and shape.tokens % shape.query_len)
    )


class ShapeRecorder:
    """Records the shape of every engine step that is scheduled after `attach`.

    It wraps `Scheduler.schedule` of an engine in this process, on CPU or GPU. A step is a decode
    step if all of its samples are past prefill.
    """

    def __init__(self) -> None:
        self._shapes: list[GraphShape] = []

    def attach(self, scheduler: Any) -> None:
        schedule = scheduler.schedule

        def recorded(*args: Any, **named: Any) -> Any:
            output = schedule(*args, **named)
            self.record_step(output, scheduler.requests)
            return output

        scheduler.schedule = recorded

    def record_step(self, output: Any, requests: Any) -> None:
        """Record the shape of one scheduled step.

        `output` is vLLM's SchedulerOutput; `requests` are the scheduler's, already advanced by the
        step.
        """
        scheduled = output.num_scheduled_tokens
        if not scheduled:
            return
        drafts = output.scheduled_spec_decode_tokens
        decoding = all(
            number - len(drafts.get(name, ())) == 1 and _past_prompt(requests[name], number)
            for name, number in scheduled.items()
        )
        self._shapes.append(_shape(list(scheduled.values()), decoding))

    def trace(self, **about: Any) -> Trace:
        runs = tuple((shape, len(list(like))) for shape, like in groupby(self._shapes))
        return Trace(runs, about)


def _past_prompt(request: Any, scheduled: int) -> bool:
    return bool(request.num_computed_tokens - scheduled >= request.num_prompt_tokens)


def _shape(tokens: list[int], decoding: bool) -> GraphShape:
    if not decoding:
        return GraphShape(sum(tokens), None)
    return GraphShape(sum(tokens), tokens[0] if len(set(tokens)) == 1 else UNEVEN)

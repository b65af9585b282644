"""Trace of the step shapes of an engine, from which plans are made and evaluated.

A file is JSON: a description, then one row per run of equal steps in order: the number of tokens,
tokens per sample and steps. Tokens per sample is null for steps that include prefill, and 0 for
decode steps whose samples had different numbers of draft tokens.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.cudagraphs.shape import GraphShape


@dataclass(frozen=True, slots=True)
class Trace:
    """Runs of equal step shapes, and a description of the recording."""

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
        raise ValueError(f"{file} is no trace of steps: {error!r}") from error
    if not runs or not all(_fits(shape, steps) for shape, steps in runs):
        raise ValueError(f"{file} is no trace of steps: a row is impossible, or there is none")
    return Trace(runs, about)


def _fits(shape: GraphShape, steps: Any) -> bool:
    numbers = [shape.tokens, steps, *([] if shape.query_len is None else [shape.query_len])]
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        return False
    return (
        shape.tokens > 0 and steps > 0 and not (shape.query_len and shape.tokens % shape.query_len)
    )

"""Recorded steps are written and read without loss, and invalid traces are refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.cudagraphs.shapes import (
    UNEVEN,
    GraphShape,
    ShapeRecorder,
    Trace,
    decode,
    mixed,
    read_trace,
)


def test_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    trace = Trace(
        ((mixed(90), 1), (decode(8, 3), 20), (GraphShape(11, UNEVEN), 2), (decode(8, 3), 5)),
        {"model": "seedling"},
    )
    trace.write(tmp_path / "trace.json")
    assert read_trace(tmp_path / "trace.json") == trace
    assert trace.counts()[decode(8, 3)] == 25


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"about": {}}',
        '{"about": {}, "steps": []}',
        '{"about": {}, "steps": [[8, 1]]}',
        '{"about": {}, "steps": [[8, 3, 1]]}',
        '{"about": {}, "steps": [[8, 1, 0]]}',
        '{"about": {}, "steps": [["8", 1, 1]]}',
    ],
)
def test_invalid_trace_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(ValueError, match="is not a step trace"):
        read_trace(tmp_path / "trace.json")


def test_missing_trace_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        read_trace(tmp_path / "trace.json")


class Scheduler:
    """vLLM's scheduler interface: requests advance by what it schedules."""

    def __init__(self, steps: list[dict[str, tuple[int, int]]]) -> None:
        self.requests: dict[str, Any] = {
            name: SimpleNamespace(num_prompt_tokens=10, num_computed_tokens=0)
            for name in ("a", "b")
        }
        self._steps = iter(steps)

    def schedule(self) -> Any:
        step = next(self._steps)
        for name, (tokens, _) in step.items():
            self.requests[name].num_computed_tokens += tokens
        return SimpleNamespace(
            num_scheduled_tokens={name: tokens for name, (tokens, _) in step.items()},
            scheduled_spec_decode_tokens={
                n: [7] * drafts for n, (_, drafts) in step.items() if drafts
            },
        )


def test_steps_are_recorded_from_the_scheduler_output() -> None:
    """Tokens and drafts by sample; the first step of `b` prefills a part of its prompt."""
    steps = [
        {"a": (10, 0), "b": (9, 0)},
        {"a": (3, 2), "b": (1, 0)},
        {"a": (3, 2), "b": (3, 2)},
        {"a": (3, 2), "b": (3, 2)},
        {"a": (2, 1), "b": (3, 2)},
        {},
        {"b": (1, 0)},
    ]
    scheduler, recorder = Scheduler(steps), ShapeRecorder()
    recorder.attach(scheduler)
    for _ in steps:
        scheduler.schedule()
    assert recorder.trace(what="test") == Trace(
        (
            (mixed(19), 1),
            (mixed(4), 1),
            (decode(2, 3), 2),
            (GraphShape(5, UNEVEN), 1),
            (decode(1, 1), 1),
        ),
        {"what": "test"},
    )

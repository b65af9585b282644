"""The CUDA graph pool benchmark, as far as it can be checked without a GPU.

The committed trace is a real one; the goals for bytes and hits are checked on it with the models.
"""

from pathlib import Path

import pytest
import torch

from bench.harness.graph_arms import Captured, prompt_of, schedule
from bench.harness.paired_runs import Pairs
from bench.planned_graphs_gpu import (
    BYTES_GOAL,
    HIT_GOAL,
    LLAMA_8B,
    TRACE,
    capture_limits,
    decode_steps,
    plans,
    table,
    write_model,
)
from bench.planned_graphs_gpu import main as bench
from engine.cudagraphs.allowed_shapes import CaptureLimits
from engine.cudagraphs.draft_lengths import DraftLengthTiers
from engine.cudagraphs.plan_score import PerLengthLookup, VllmLookup, estimate_memory, score
from engine.cudagraphs.shapes import read_trace


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU")
def test_without_a_gpu_it_exits_with_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    bench([])
    assert capsys.readouterr().out == "no GPU: not run\n"


def test_plan_meets_its_modelled_goals_on_the_recorded_trace(tmp_path: Path) -> None:
    trace, memory = (
        read_trace(TRACE),
        estimate_memory(write_model(tmp_path / "model", dict(LLAMA_8B))),
    )
    full, ours = plans(trace, memory)
    theirs, judged = (
        score(made.shapes, PerLengthLookup(made.shapes), trace.counts(), memory)
        for made in (full, ours)
    )
    assert judged.total_bytes <= BYTES_GOAL * theirs.total_bytes
    assert judged.hit_rate >= HIT_GOAL
    assert score(full.shapes, VllmLookup(full.shapes), trace.counts(), memory).hit_rate < 0.7
    assert (1 + judged.padding) / (1 + theirs.padding) <= 1.01


def test_recorded_trace_has_every_length_and_a_long_tail() -> None:
    trace = read_trace(TRACE)
    steps = decode_steps(trace, 10**6)
    assert {shape.query_len for shape, _ in steps} >= set(capture_limits(trace).lengths.query_lens)
    assert {shape.samples for shape, _ in steps} >= {1, 2, 3, 64}


def test_schedule_has_the_longest_draft_that_may_be_chosen() -> None:
    def limits(text: str) -> CaptureLimits:
        return CaptureLimits(
            lengths=DraftLengthTiers.parse(text), max_sequences=64, max_batched_tokens=2048
        )

    assert schedule(limits("8:0,4 32:2 0")) == [(1, 8, 4), (9, 32, 2), (33, 64, 0)]
    with pytest.raises(AssertionError, match="leaves out drafts"):
        schedule(limits("8:1,4 0"))


def test_prompts_are_different_and_within_a_small_vocabulary() -> None:
    prompts = [prompt_of(row, 269) for row in range(64)]
    assert max(map(max, prompts)) < 269
    assert len(set(map(tuple, prompts))) == 64


def test_table_reports_the_goals_met() -> None:
    full = Captured(num_graphs=100, measured_bytes=1000, hits=50, misses=0)
    ours = Captured(num_graphs=30, measured_bytes=350, hits=97, misses=3)
    estimates = plans(read_trace(TRACE), estimate_memory(Path("examples/seedling/model")))
    rows = table(full, ours, estimates, Pairs(a=[1.0] * 9, b=[1.005] * 9), 0.9)
    assert [row.verdict for row in rows] == ["met", "", "missed", "met"]

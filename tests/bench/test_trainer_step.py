"""The arms of the trainer benchmark compute the same, and its table reports the measurements."""

from functools import partial

import pytest
import torch

from bench.optimizer_step.arms import Arms
from bench.optimizer_step.cells import DTYPES, SHAPES, VOCABULARIES, Cell
from bench.trainer_step import record

TEXT = "1000/100x8,float32,512"


def test_cell_is_parsed_from_its_notation() -> None:
    cell = Cell.of(TEXT)
    assert str(cell) == TEXT
    assert (cell.prompt_tokens, cell.response_tokens, cell.num_samples) == (1000, 100, 8)


def test_goals_cover_the_small_vocabulary_and_groups_of_eight() -> None:
    with_goal = {
        f"{shape},{dtype}"
        for shape in SHAPES
        for dtype in DTYPES
        for vocabulary in VOCABULARIES
        if Cell.of(f"{shape},{dtype},{vocabulary}").goal
    }
    assert with_goal == {f"{shape},{dtype}" for shape in SHAPES[:4] for dtype in DTYPES}
    assert Cell.of(TEXT).goal == 4.7


@pytest.mark.slow
def test_all_arms_have_the_same_gradient() -> None:
    arms = Arms(Cell.of("40/9x3,float32,512"), torch.device("cpu"))
    ours = arms.gradient(arms.ours)
    for other in (arms.public, arms.single, partial(arms.naive_rows, 3)):
        assert (arms.gradient(other) - ours).norm() < 1e-5 * ours.norm()


def test_table_reports_the_goals_met() -> None:
    seconds = {"ours": [2.0, 2.1], "naive": [10.0, 10.4], "public": [1.9, 2.0]}
    mib = {"naive": 500.0, "kept": 760.0, "recomputed": 640.0, "single": 540.0}
    mib |= {"injected": 651.0, "packed": 860.0}
    rows = record(
        {
            "memory": {TEXT: {"mib": mib}},
            "time": {TEXT: {"seconds": seconds, "micro_batch": 1}},
            "handle": {
                TEXT: {
                    "seconds": {
                        "update": [2.0, 2.0],
                        "update_given": [2.0, 2.0],
                        "logprobs": [1.0, 1.0],
                        "logprobs_given": [0.5, 0.5],
                    }
                }
            },
        }
    ).rows
    naive, public, update, logprobs, memory = rows
    assert (naive.goal, naive.verdict) == (">= 4.7", "met")
    assert (public.goal, public.verdict) == (">= 1.0", "missed")
    assert update.value.startswith("1.00 ") and logprobs.value.startswith("2.00 ")
    assert "one response per pass 540" in memory.value and memory.verdict == "met"

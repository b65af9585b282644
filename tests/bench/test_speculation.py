"""The speculation benchmark: teacher forcing, records and estimates."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench.harness.replay_estimate import cells, predict_seconds
from bench.harness.speculation_results import (
    ArmResult,
    Round,
    guard_rows,
    share_of_oracle,
    speedup,
    summarize_run,
    workload_rows,
)
from bench.harness.teacher_forced import Fixed, OraclePolicy, TeacherForced
from engine.speculation.cost import Step
from kernels.draft_index.compiled_store import is_built
from tests.engine.speculation.cost_simulator import Drafts

TEXT = [5, 6, 7, 8]


@dataclass
class Sampled:
    sampled_token_ids: torch.Tensor


class Runner:
    """Two rows, the first of which has generated one token."""

    def __init__(self) -> None:
        self.input_batch = SimpleNamespace(
            req_ids=["a", "b"],
            num_tokens_no_spec=np.array([4, 9, 0]),
            num_prompt_tokens=np.array([3, 9, 0]),
        )

    def _sample(self, _: Any, metadata: Any) -> Sampled:
        most = 0 if metadata is None else max(metadata.num_draft_tokens)
        return Sampled(torch.full((2, most + 1), 99, dtype=torch.int32))


@pytest.fixture
def forced() -> TeacherForced:
    forced = TeacherForced(Runner())
    forced.texts = {"a": TEXT, "b": TEXT}
    return forced


def sampled(forced: TeacherForced, *drafts: list[int]) -> list[list[int]]:
    metadata = SimpleNamespace(
        num_draft_tokens=[len(draft) for draft in drafts],
        draft_token_ids=torch.tensor([token for draft in drafts for token in draft]),
    )
    rows: list[list[int]] = forced.sample(None, metadata).sampled_token_ids.tolist()
    return rows


def test_row_generates_its_correct_drafts_and_one_more_token(forced: TeacherForced) -> None:
    assert sampled(forced, [6, 7, 1], [5]) == [[6, 7, 8, -1], [5, 6, -1, -1]]
    assert forced.sample(None, None).sampled_token_ids.tolist() == [[6], [5]]


def test_text_ends_where_it_ends(forced: TeacherForced) -> None:
    assert sampled(forced, [6, 7, 8], []) == [[6, 7, 8, -1], [5, -1, -1, -1]]


def test_rows_without_a_text_are_not_forced(forced: TeacherForced) -> None:
    forced.texts = {}
    assert sampled(forced, [], []) == [[99], [99]]


def test_oracle_drafts_correct_tokens_and_fixed_length_its_number(
    forced: TeacherForced,
) -> None:
    drafted = Drafts.alike(2, 3, 0.5)
    assert Fixed(2).lengths(drafted, running=2, context=20).tolist() == [2, 2]
    summary = SimpleNamespace(
        tokens=np.array([[6, 7, 1], [6, 6, 7]]), lengths=np.array([3, 3], np.int32)
    )
    assert OraclePolicy(forced).lengths(summary, running=2, context=20).tolist() == [2, 0]


def run(seconds: float) -> dict[str, Any]:
    decoded = [(8, 80, 8, 8, seconds), (8, 88, 8, 8, seconds), (1, 20, 3, 2, seconds)]
    counted = {"tokens": 18, "drafted": 2, "accepted": 1}
    return {"seconds": 3, "cpu_seconds": 2 * seconds, "decoded": decoded, **counted}


def one_round(seed: int, *names: str) -> Round:
    arms: dict[str, ArmResult] = {name: summarize_run(run(0.5), 1.5) for name in names}
    return Round(seed=seed, surprise=1.8, arms=arms, steps=cells([run(0.5)]))


def test_record_grows_by_rounds_and_repeated_rounds_are_replaced(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    rounds: list[Round] = []
    for new in (one_round(1, "off", "ours"), one_round(2, "off", "ours"), one_round(1, "off")):
        rounds = Round.added(file, [new])
        file.write_text(json.dumps({"raw": {"rounds": [one.summary() for one in rounds]}}))
    assert [one.seed for one in rounds] == [1, 2, 1]
    rounds = Round.added(file, [one_round(1, "ours", "off")])
    assert [(one.seed, len(one.arms)) for one in rounds] == [(2, 2), (1, 1), (1, 2)]
    assert rounds[-1].steps == [Step(running=8, context=84, verified=8, seconds=0.5)]


def test_arms_are_compared_in_common_rounds() -> None:
    rows = workload_rows([one_round(1, "off", "ours"), one_round(2, "off", "ours", "ngram")])
    summary = {row.what: row.value for row in rows}
    assert summary["text"] == "0.100 nats per token"
    assert summary["ours over off, 2 rounds"].startswith("1.00x [1.00, 1.00]")
    assert summary["ours over ngram, 1 rounds"].startswith("1.00x")


def test_tails_are_compared_in_rounds_that_counted_them() -> None:
    rounds = [one_round(seed, "off", "ours") for seed in (1, 2, 3)]
    for arm in rounds[0].arms.values():
        arm.buckets["8"] = [
            a + b for a, b in zip(arm.buckets.pop("4"), arm.buckets["8"], strict=True)
        ]
    rows = {row.what: row.value for row in workload_rows(rounds)}
    assert "with 4 or fewer running, 2 rounds, 1.00x" in rows["ours over off, 3 rounds"]
    assert "<= 1: 33%, <= 4: 0%, <= 8: 67%" in rows["ours: 3 runs"]


def test_speed_of_tails_does_not_depend_on_the_number_of_samples() -> None:
    rounds = [one_round(seed, "off", "ours") for seed in (1, 2)]
    for one in rounds:
        for name, rows in (("off", 4), ("ours", 2)):
            steps = [(rows, 100, rows, rows, 1.0)]
            one.arms[name] = summarize_run(run(1.0) | {"decoded": steps}, None)
    assert "running, 2 rounds, 1.00x" in speedup(rounds, "off").value


def test_gain_is_compared_with_the_oracle_over_all_rounds() -> None:
    rounds = [one_round(seed, "off", "ours", "oracle") for seed in (1, 2, 3)]
    for one in rounds[:2]:
        one.arms["oracle"] = summarize_run(run(0.25), None)
    del rounds[2].arms["ours"]
    row = share_of_oracle(rounds, "off")
    assert row.what == "ours and oracle over off, total of 2 rounds"
    few = "with 4 or fewer running 1.00x and 2.00x per sample"
    assert row.value == f"1.00x and 2.00x tokens/s; {few}"


def test_guard_compares_times_and_an_arm_with_itself() -> None:
    rounds = [one_round(seed, "off", "ours", "disabled", "disabled-again") for seed in (1, 2)]
    for one in rounds:
        one.arms["ours"] = summarize_run(run(0.8), None)
    rows = {row.what: row for row in guard_rows(rounds)}
    loss = rows["ours over disabled, 2 rounds, wall time"]
    assert (loss.value, loss.verdict) == ("0.625x [0.625, 0.625] as fast", "missed")
    assert rows["ours over off, 2 rounds, CPU time"].value == loss.value
    assert rows["disabled-again over disabled, 2 rounds, CPU time"].verdict == "met"


def test_guard_leaves_rounds_without_cpu_time_out_of_its_comparison() -> None:
    new, old = (one_round(seed, "off", "ours") for seed in (1, 2))
    old.arms["off"] = replace(old.arms["off"], cpu_seconds=None)
    rows = [row.what for row in guard_rows([new, old])][-2:]
    assert rows == ["ours over off, 2 rounds, wall time", "ours over off, 1 rounds, CPU time"]


@pytest.mark.skipif(not is_built(), reason="the draft store was not built: no C++ compiler")
def test_estimates_are_per_round_with_the_oracle_as_the_bound() -> None:
    steps = [
        Step(running=rows, context=40 * rows, verified=rows * more, seconds=1 + rows * more / 50)
        for rows in (1, 2, 4)
        for more in (1, 2, 4, 8)
    ]
    prompts, texts = [[[1, 2, 3]]] * 2, [[list(range(9, 40))] * 4] * 2
    found = {
        name: predict_seconds(name, prompts, texts, steps)
        for name in ("off", "fixed-8", "ours", "oracle")
    }
    assert predict_seconds("ngram", prompts, texts, steps) is None
    for seconds in found.values():
        assert seconds is not None
        assert len(seconds) == 2
    assert found["off"] is not None
    assert found["oracle"] is not None
    assert found["off"][0] == pytest.approx(found["off"][1])
    assert found["oracle"][1] < found["off"][1]

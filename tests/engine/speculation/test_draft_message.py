"""Realignment of drafts after the tokens of a step, and the choice of one length for all rows."""

from typing import Any

import numpy as np
import pytest
import torch

from engine.speculation.calibration import DraftCalibration
from engine.speculation.core.uniform_length import UniformController, longest_length
from engine.speculation.cost import StepCostModel
from engine.speculation.draft_message import LateDrafts, after_step, lookup_length
from engine.speculation.worker.gpu_speculator import realign
from kernels.draft_index.store_protocol import DraftBatch
from tests.engine.speculation.cost_simulator import Drafts, Machine, calibrated
from tests.engine.speculation.test_cost import profile

TEXT = [1, 2, 3]
DRAFT = [10, 11, 12, 13, 14]


def late(lengths: list[int], width: int = len(DRAFT)) -> LateDrafts:
    return LateDrafts(
        rows={f"r{row}": row for row in range(len(lengths))},
        num_tokens=np.full(len(lengths), len(TEXT), np.int32),
        lengths=np.array(lengths, np.int32),
        tokens=np.array([DRAFT[:n] + [0] * (width - n) for n in lengths], np.int32),
    )


def aligned(new: list[int], length: int = len(DRAFT), *, room: int = 12) -> list[int]:
    """The draft of a request that has generated `new` since the lookup."""
    tokens = torch.zeros(3, room, dtype=torch.int32)
    tokens[1, : len(TEXT + new)] = torch.tensor(TEXT + new)
    total = torch.tensor([0, len(TEXT + new), 0], dtype=torch.int32)
    table = torch.from_numpy(late([length]).table(["r0"], [1]))
    return realign(table, tokens, total)[0].tolist()


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        ([], DRAFT),
        ([10], [11, 12, 13, 14, 0]),
        ([10, 11, 12], [13, 14, 0, 0, 0]),
        (DRAFT, [0] * 5),
        ([*DRAFT, 15], [0] * 5),
        ([9], [0] * 5),
        ([10, 9], [0] * 5),
    ],
)
def test_generated_part_is_cut_off_and_a_draft_that_differs_is_dropped(
    new: list[int], expected: list[int]
) -> None:
    assert aligned(new) == expected


def test_short_draft_has_no_tokens_after_its_end() -> None:
    assert aligned([10], 3) == [11, 12, 0, 0, 0]
    assert aligned([10, 11, 12, 0], 3) == [0] * 5  # the padding is no draft
    assert aligned([], 0) == [0] * 5


def test_draft_at_the_end_of_the_context_reads_no_token_beyond_it() -> None:
    assert aligned([10, 11], room=5) == [12, 13, 14, 0, 0]


def test_draft_of_a_request_that_starts_again_is_dropped() -> None:
    """After a preemption the runner has fewer tokens than at the lookup."""
    table = torch.from_numpy(late([5]).table(["r0"], [0]))
    tokens, total = torch.ones(1, 12, dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    assert realign(table, tokens, total)[0].tolist() == [0] * 5


def test_request_without_a_draft_gets_an_empty_one() -> None:
    table = late([5, 2]).table(["other", "r1"], [4, 2])
    assert table[0].tolist() == [4, 0, 0, 0, 0, 0, 0, 0]
    assert table[1].tolist() == [2, 3, 2, 10, 11, 0, 0, 0]


def drafted(lengths: list[int], probability: list[float]) -> DraftBatch:
    empty = DraftBatch.empty(len(lengths), len(DRAFT))
    tokens = late(lengths)
    arrays: dict[str, Any] = {
        "lengths": tokens.lengths,
        "tokens": tokens.tokens,
        "probability": np.tile(np.array(probability, np.float32), (len(lengths), 1)),
    }
    return DraftBatch(
        **arrays,
        scope=empty.scope,
        match_length=empty.match_length,
        num_agreeing=empty.num_agreeing,
        total=empty.total,
    )


def test_rest_of_a_draft_is_right_only_if_its_start_was() -> None:
    rest = after_step(drafted([5, 5, 2], [0.5, 0.8, 0.9, 0.9, 0.7]), np.array([0, 2, 2]), 2)
    assert rest.lengths.tolist() == [2, 2, 0]
    assert rest.tokens[:2].tolist() == [[10, 11], [12, 13]]
    assert rest.probability[0].tolist() == pytest.approx([0.5, 0.8])
    assert rest.probability[1].tolist() == pytest.approx([0.5 * 0.8 * 0.9, 0.9])


def test_lookup_reaches_over_a_step_that_accepts_everything() -> None:
    assert lookup_length(4) == 4 + 1 + 4


def uniform(machine: Machine, max_samples: dict[int, int]) -> UniformController:
    controller = UniformController(max_samples, StepCostModel(profile(machine)), DraftCalibration())
    calibrated(controller)
    return controller


def choice(probability: list[float], max_samples: dict[int, int], machine: Machine) -> list[int]:
    drafts = Drafts(
        lengths=np.full(len(probability), 8, np.int32),
        probability=np.tile(np.array(probability, np.float32)[:, None], (1, 8)),
    )
    controller = uniform(machine, max_samples)
    running = len(probability)
    lengths: list[int] = controller.lengths(drafts, running=running, context=100 * running).tolist()
    return lengths


def test_all_rows_get_one_length_that_has_graphs() -> None:
    cheap = Machine(free_tokens=64)
    assert choice([0.95, 0.9, 0.95, 0.9], {0: 8, 2: 8, 5: 8}, cheap) == [5] * 4
    assert choice([0.95, 0.9, 0.95, 0.9], {0: 8, 2: 8, 5: 3}, cheap) == [2] * 4
    assert choice([0.95, 0.9, 0.95, 0.9], {0: 8}, cheap) == [0] * 4


def test_few_good_drafts_do_not_pay_for_all_rows() -> None:
    dear = Machine(call=1e-4, token=1e-3, free_tokens=0)
    assert choice([0.95, *[0.02] * 7], {0: 8, 4: 8}, dear) == [0] * 8
    assert choice([0.98] * 8, {0: 8, 4: 8}, Machine(free_tokens=64)) == [4] * 8


def test_longest_length_that_a_batch_may_use() -> None:
    assert longest_length({0: 8, 2: 8, 4: 2}, 2, 8) == 4
    assert longest_length({0: 8, 2: 8, 4: 2}, 3, 8) == 2
    assert longest_length({0: 8, 2: 8, 4: 2}, 3, 1) == 0

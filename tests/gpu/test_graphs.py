"""An engine on a GPU captures exactly its plan, and decodes with it."""

import pytest
import torch

from bench.harness.graph_arms import Arm, Request
from engine.cudagraphs.allowed_shapes import CaptureLimits
from engine.cudagraphs.draft_lengths import DraftLengthTiers
from engine.cudagraphs.plan_score import estimate_memory
from engine.cudagraphs.planner import plan
from tests.engine.cudagraphs.managers import SEEDLING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


def test_plan_is_captured_and_every_decode_step_hits_a_graph() -> None:
    limits = CaptureLimits(
        lengths=DraftLengthTiers.parse("8:4 32:2 0"), max_sequences=64, max_batched_tokens=2048
    )
    made = plan(limits, estimate_memory(SEEDLING), budget_bytes=None, mixed_tokens=128)
    with Arm(SEEDLING, SEEDLING, limits, made) as arm:
        for samples, drafts in ((1, 4), (7, 4), (9, 2), (31, 2), (33, 0), (63, 0)):
            assert arm.seconds(Request(samples, drafts)) > 0
        captured = arm.captured()
    assert captured.num_graphs == len(made.shapes)
    assert captured.measured_bytes > 0
    assert captured.hits > 0 == captured.misses

"""Drafted tokens are verified by shared-prefix attention with several query tokens per row."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.attention.sample_groups import StepKinds, assert_all_greedy, sample
from tests.engine.attention.shared_engine import shared_engine
from tests.engine.upstream_defects import SPECULATION

# Imports of vLLM and its draft methods emit unrelated warnings.
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


def test_drafted_tokens_are_verified_in_groups(
    sharp_model: Path, reference: Any, tmp_path: Path
) -> None:
    with shared_engine(sharp_model, tmp_path, **SPECULATION) as engine:
        kinds = StepKinds(engine)
        with engine.mode("always") as counted:
            answers = sample(engine, 60)
    assert_all_greedy(reference, answers)
    assert counted["steps_grouped"] > 0
    assert kinds.drafted

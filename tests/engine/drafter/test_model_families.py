"""Drafting for models of several families on the real engine.

docs/reference/model-features.md has these results.
"""

from pathlib import Path

import pytest

from tests.engine.drafter.drafter_engine import drafter_engine, num_accepted
from tests.engine.model_families import save_family
from tests.engine.seedling import reference, teacher_forced
from tests.engine.stepped_engine import Answer

pytestmark = [
    pytest.mark.engine,
    pytest.mark.exhaustive,
    pytest.mark.filterwarnings("ignore"),
]
PROMPT = [5 + i * 7 % 200 for i in range(100)]  # longer than the sliding windows
TOLERANCE = 1e-4


FAMILIES = ["mixture_of_experts", "sliding_window"]


def largest_error(answer: Answer, model: Path) -> float:
    """Largest difference of a sample's logprobs from those of transformers."""
    expected = teacher_forced(reference(model), PROMPT, answer.token_ids)
    return max(abs(a - b) for a, b in zip(answer.logprobs, expected, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_are_exact_and_drafts_are_accepted(family: str, tmp_path: Path) -> None:
    """The drafter is the served model itself, so all drafts for greedy samples are accepted."""
    model = save_family(tmp_path / "model", family)
    with drafter_engine(model, model) as engine:
        answers = engine.ask(*[PROMPT] * 4, max_tokens=24, temperature=1.0)
        before = num_accepted(engine)
        engine.ask(PROMPT, max_tokens=24, temperature=0.0)
        accepted = num_accepted(engine) - before
    assert max(largest_error(answer, model) for answer in answers) < TOLERANCE
    assert accepted > 12


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_are_exact_with_a_dense_drafter(family: str, tmp_path: Path) -> None:
    model = save_family(tmp_path / "model", family)
    drafter = save_family(tmp_path / "drafter", "dense", seed=9)
    with drafter_engine(model, drafter) as engine:
        [answer] = engine.ask(PROMPT, max_tokens=24, temperature=1.0)
    assert largest_error(answer, model) < TOLERANCE

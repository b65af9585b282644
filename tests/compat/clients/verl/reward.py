"""A reward function that verl loads by file path."""

import random
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """Distinct within a group; equal rewards would give no gradient."""
    return random.random()

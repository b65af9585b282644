"""verl takes this file by its path."""

import random
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """Never equal within a group, or there would be nothing to learn."""
    return random.random()

"""Numbers of samples and of random cases, which depend on the target of make."""

import math
import os

TIMES = float(os.environ.get("COPPICE_DRAWS", "0.1"))
"""Factor of all sample sizes: 0.1 in `make test`, 0.3 in `make test-full`, 1 in `make soak`."""


def num_examples(number: int) -> int:
    """Number of random or repeated cases: a quarter of them in `make test`."""
    return number if TIMES >= 0.3 else math.ceil(number / 4)

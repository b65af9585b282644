"""Sample sizes and the significance level of the lossless-speculation tests."""

import pytest

from tests.engine.speculation.distributions import SETTINGS
from tests.sample_sizes import TIMES

NUM_DRAWS = int(100_000 * TIMES)
DETECTABLE = 0.01 * TIMES**-0.5
"""Total variation that this number of draws detects: 0.032, 0.018 and 0.01."""
NUM_SEQUENCES = int(20_000 * TIMES)
CONTEXTS = 5
NUM_TESTS = 62
MIN_P_VALUE = 1e-4 / NUM_TESTS
"""After Bonferroni: a correct implementation fails any test of a family once in 10,000 runs."""
ROWS, SIBLINGS = 64, 8

all_settings = pytest.mark.parametrize("setting", SETTINGS, ids=["plain", "truncated"])
truncated_or_exhaustive = pytest.mark.parametrize(
    "setting",
    [pytest.param(SETTINGS[0], marks=pytest.mark.exhaustive), SETTINGS[1]],
    ids=["plain", "truncated"],
)

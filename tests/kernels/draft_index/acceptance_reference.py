"""Acceptance probability of drafted tokens, estimated from the outcomes of earlier drafts.

Test oracle of kernels/draft_index/csrc/acceptance_estimate.h. Each combination of scope, match
length, agreement and position has a cell, which counts the drafted tokens that were reached and
those that were accepted.
A cell with few counts is smoothed with its coarse cell, which combines scope and agreement only.
Counts are halved when they reach a maximum, so that old outcomes lose weight.
"""

from bisect import bisect_right

import numpy as np

from kernels.draft_index.store_protocol import NUM_BINS, NUM_SCOPES, Reliability

# Cells of the acceptance estimate (csrc/acceptance_estimate.h): combinations of scope, match
# length, agreement and position; a coarse cell combines scope and agreement only.
MATCH_LENGTH_BOUNDS = (3, 4, 6, 9, 13, 20, 32)
POSITION_BOUNDS = (1, 2, 3, 5, 9)
UNANIMOUS_BOUNDS = (2, 3, 5, 9)
NUM_AGREEMENTS = 3 + len(UNANIMOUS_BOUNDS) + 1
NUM_MATCH_BINS = len(MATCH_LENGTH_BOUNDS) + 1
NUM_POSITION_BINS = len(POSITION_BOUNDS) + 1
NUM_CELLS = NUM_SCOPES * NUM_AGREEMENTS * NUM_MATCH_BINS * NUM_POSITION_BINS
NUM_COARSE_CELLS = NUM_SCOPES * NUM_AGREEMENTS
MAX_COUNT, MAX_COARSE_COUNT = 2**12, 2**16
PRIOR_WEIGHT = 8.0
"""Number of pseudo-counts added: at the coarse cell's rate to a cell, at 0.5 to a coarse cell."""


def agreement_class(num_agreeing: int, total: int) -> int:
    """Bin of the agreement of votes for a token: by share if split, by number if unanimous."""
    if num_agreeing < total:
        return 0 if 2 * num_agreeing < total else 1 if 4 * num_agreeing < 3 * total else 2
    return 3 + bisect_right(UNANIMOUS_BOUNDS, total)


def cell(scope: int, match_length: int, num_agreeing: int, total: int, position: int) -> int:
    coarse = scope * NUM_AGREEMENTS + agreement_class(num_agreeing, total)
    fine = coarse * NUM_MATCH_BINS + bisect_right(MATCH_LENGTH_BOUNDS, match_length)
    return fine * NUM_POSITION_BINS + bisect_right(POSITION_BOUNDS, position)


def coarse_cell(cell: int) -> int:
    return cell // (NUM_MATCH_BINS * NUM_POSITION_BINS)


class AcceptanceEstimate:
    """Estimates acceptance probabilities of drafted tokens from the outcomes of earlier drafts.

    It holds counts by cell and coarse cell, and the reliability of its predictions.
    """

    def __init__(self) -> None:
        self.tried = np.zeros(NUM_CELLS, np.uint32)
        self.accepted = np.zeros(NUM_CELLS, np.uint32)
        self.coarse_tried = np.zeros(NUM_COARSE_CELLS, np.uint32)
        self.coarse_accepted = np.zeros(NUM_COARSE_CELLS, np.uint32)
        self.reliability = Reliability(
            tried=np.zeros((NUM_SCOPES, NUM_BINS), np.int64),
            accepted=np.zeros((NUM_SCOPES, NUM_BINS), np.int64),
            predicted=np.zeros((NUM_SCOPES, NUM_BINS), np.float64),
        )

    def probability(self, cell: int) -> np.float32:
        coarse = coarse_cell(cell)
        prior = (int(self.coarse_accepted[coarse]) + 0.5 * PRIOR_WEIGHT) / (
            int(self.coarse_tried[coarse]) + PRIOR_WEIGHT
        )
        return np.float32(
            (int(self.accepted[cell]) + prior * PRIOR_WEIGHT)
            / (int(self.tried[cell]) + PRIOR_WEIGHT)
        )

    def update(self, cell: int, probability: np.float32, *, accepted: bool) -> None:
        _count_trial(self.tried, self.accepted, cell, accepted, MAX_COUNT)
        _count_trial(
            self.coarse_tried, self.coarse_accepted, coarse_cell(cell), accepted, MAX_COARSE_COUNT
        )
        scope = coarse_cell(cell) // NUM_AGREEMENTS
        at = scope, min(int(probability * np.float32(NUM_BINS)), NUM_BINS - 1)
        self.reliability.tried[at] += 1
        self.reliability.accepted[at] += accepted
        self.reliability.predicted[at] += float(probability)


def _count_trial(
    tried: np.ndarray, accepted: np.ndarray, at: int, success: bool, max_count: int
) -> None:
    tried[at] += 1
    accepted[at] += success
    if tried[at] == max_count:
        tried[at] //= 2
        accepted[at] //= 2

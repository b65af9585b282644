"""How likely a drafted token is to be accepted, learnt from what came of earlier drafts, slowly.

A cell for every combination of scope, match length, agreement and position counts how often a draft
got so far and how often its token came. A cell with few counts leans on its coarse cell, of scope
and agreement alone. Counts are halved when they are full, so that the past fades.
"""

from bisect import bisect_right

import numpy as np

from kernels.draft_index.reliability import NUM_BINS, Reliability

SCOPES = 4
MATCH_BOUNDS = (3, 4, 6, 9, 13, 20, 32)
POSITION_BOUNDS = (1, 2, 3, 5, 9)
UNANIMOUS_BOUNDS = (2, 3, 5, 9)
AGREEMENTS = 3 + len(UNANIMOUS_BOUNDS) + 1
MATCHES = len(MATCH_BOUNDS) + 1
POSITIONS = len(POSITION_BOUNDS) + 1
CELLS = SCOPES * AGREEMENTS * MATCHES * POSITIONS
COARSE_CELLS = SCOPES * AGREEMENTS
FULL, COARSE_FULL = 2**12, 2**16
LEAN = 8.0
"""So many trials of the coarse cell are added to those of the fine one, and of even chances to
those of the coarse one."""


def agreement(agreeing: int, total: int) -> int:
    """Of split votes by their share, of unanimous ones by their number."""
    if agreeing < total:
        return 0 if 2 * agreeing < total else 1 if 4 * agreeing < 3 * total else 2
    return 3 + bisect_right(UNANIMOUS_BOUNDS, total)


def cell(scope: int, matched: int, agreeing: int, total: int, position: int) -> int:
    coarse = scope * AGREEMENTS + agreement(agreeing, total)
    fine = coarse * MATCHES + bisect_right(MATCH_BOUNDS, matched)
    return fine * POSITIONS + bisect_right(POSITION_BOUNDS, position)


def coarse_of(cell: int) -> int:
    return cell // (MATCHES * POSITIONS)


class Calibration:
    def __init__(self) -> None:
        self.tried = np.zeros(CELLS, np.uint32)
        self.came = np.zeros(CELLS, np.uint32)
        self.coarse_tried = np.zeros(COARSE_CELLS, np.uint32)
        self.coarse_came = np.zeros(COARSE_CELLS, np.uint32)
        self.reliability = Reliability(
            tried=np.zeros((SCOPES, NUM_BINS), np.int64),
            came=np.zeros((SCOPES, NUM_BINS), np.int64),
            foretold=np.zeros((SCOPES, NUM_BINS), np.float64),
        )

    def probability(self, cell: int) -> np.float32:
        coarse = coarse_of(cell)
        prior = (int(self.coarse_came[coarse]) + 0.5 * LEAN) / (
            int(self.coarse_tried[coarse]) + LEAN
        )
        return np.float32((int(self.came[cell]) + prior * LEAN) / (int(self.tried[cell]) + LEAN))

    def learn(self, cell: int, probability: np.float32, *, came: bool) -> None:
        _count(self.tried, self.came, cell, came, FULL)
        _count(self.coarse_tried, self.coarse_came, coarse_of(cell), came, COARSE_FULL)
        scope = coarse_of(cell) // AGREEMENTS
        at = scope, min(int(probability * np.float32(NUM_BINS)), NUM_BINS - 1)
        self.reliability.tried[at] += 1
        self.reliability.came[at] += came
        self.reliability.foretold[at] += float(probability)


def _count(tried: np.ndarray, came: np.ndarray, at: int, success: bool, full: int) -> None:
    tried[at] += 1
    came[at] += success
    if tried[at] == full:
        tried[at] //= 2
        came[at] //= 2

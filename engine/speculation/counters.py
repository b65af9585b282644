"""Per-process counters of drafted and accepted tokens, exported as metrics."""

from collections import Counter
from typing import TypedDict, get_args

import numpy as np
from numpy.typing import NDArray

from engine.types.feature_stats import (
    DraftScope,
    SpeculationDecision,
    SpeculationSkipReason,
    SpeculationStats,
)

SCOPES: tuple[DraftScope, ...] = get_args(DraftScope)
"""Draft scopes, in the order of their numbers in the draft store."""


class Snapshot(TypedDict):
    """Speculation counters of one process, as sent to the service."""

    drafted: dict[DraftScope, int]
    accepted: dict[DraftScope, int]
    drafts: dict[int, int]
    steps: dict[SpeculationDecision, int]
    skipped: dict[SpeculationSkipReason, int]
    version_drafted: int
    version_accepted: int
    gain_ratio: float
    cost_error_ratio: float
    store_bytes: int


class Counters:
    """Speculation counters, written by the thread that runs the steps and read between steps."""

    def __init__(self) -> None:
        self._drafted = np.zeros(len(SCOPES), np.int64)
        self._accepted = np.zeros(len(SCOPES), np.int64)
        self._of_version = np.zeros(2, np.int64)
        self._lengths: Counter[int] = Counter()
        self._steps: Counter[SpeculationDecision] = Counter()
        self._skipped: Counter[SpeculationSkipReason] = Counter()
        self.gain_ratio = 1.0
        self.cost_error_ratio = 0.0
        self.store_bytes = 0

    def record_step(self, decision: SpeculationDecision) -> None:
        self._steps[decision] += 1

    def record_skipped(self, reason: SpeculationSkipReason) -> None:
        self._skipped[reason] += 1

    def record_verified(
        self, scopes: NDArray[np.uint8], sent: NDArray[np.int64], accepted: NDArray[np.int64]
    ) -> None:
        """Count sent and accepted draft tokens by scope; `scopes` is [rows, longest]."""
        positions = np.arange(scopes.shape[1])
        of_scope, of_accepted = (
            np.bincount(scopes[positions < lengths[:, None]], minlength=len(SCOPES))
            for lengths in (sent, accepted)
        )
        self._drafted += of_scope
        self._accepted += of_accepted
        self._of_version += (of_scope.sum(), of_accepted.sum())
        self._lengths.update(sent[sent > 0].tolist())

    def on_weights_changed(self) -> None:
        self._of_version[:] = 0

    def read(self) -> Snapshot:
        drafted, accepted = self._of_version.tolist()
        return Snapshot(
            drafted=dict(zip(SCOPES, self._drafted.tolist(), strict=True)),
            accepted=dict(zip(SCOPES, self._accepted.tolist(), strict=True)),
            drafts=dict(self._lengths),
            steps=dict(self._steps),
            skipped=dict(self._skipped),
            version_drafted=drafted,
            version_accepted=accepted,
            gain_ratio=self.gain_ratio,
            cost_error_ratio=self.cost_error_ratio,
            store_bytes=self.store_bytes,
        )


COUNTERS = Counters()


def to_speculation_stats(counted: Snapshot) -> SpeculationStats:
    """Speculation statistics of an engine, from the first rank; other ranks draft nothing."""
    return SpeculationStats(**counted)

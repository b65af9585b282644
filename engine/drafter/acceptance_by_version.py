"""Counters of accepted draft tokens per pair of drafter version and weights version."""

from collections import OrderedDict
from typing import Final, TypedDict

MAX_PAIRS: Final = 8


class PairSnapshot(TypedDict):
    """Draft acceptance counts of one drafter version with one weights version.

    `first_drafted` counts drafts, `first_accepted` the drafts whose first token was accepted. Their
    ratio does not depend on draft length.
    """

    drafter: str
    weights: str
    drafted: int
    accepted: int
    first_drafted: int
    first_accepted: int


class Snapshot(TypedDict):
    """Drafter counters of one EngineCore, as sent to the service.

    `pairs` are ordered from oldest to latest.
    """

    serving: str
    pairs: list[PairSnapshot]


class PairCounters:
    """Acceptance counters of the latest MAX_PAIRS pairs of drafter version and weights version.

    Memory therefore does not grow with the number of versions.
    """

    def __init__(self) -> None:
        self._pairs: OrderedDict[tuple[str, str], PairSnapshot] = OrderedDict()

    def record_verified(
        self, drafter: str, weights: str, num_drafted: int, num_accepted: int
    ) -> None:
        pair = self._pairs.get((drafter, weights)) or self._new_pair(drafter, weights)
        pair["drafted"] += num_drafted
        pair["accepted"] += num_accepted
        pair["first_drafted"] += 1
        pair["first_accepted"] += num_accepted > 0

    def read(self) -> list[PairSnapshot]:
        return [pair.copy() for pair in self._pairs.values()]

    def _new_pair(self, drafter: str, weights: str) -> PairSnapshot:
        pair = PairSnapshot(
            drafter=drafter,
            weights=weights,
            drafted=0,
            accepted=0,
            first_drafted=0,
            first_accepted=0,
        )
        self._pairs[drafter, weights] = pair
        while len(self._pairs) > MAX_PAIRS:
            self._pairs.popitem(last=False)
        return pair

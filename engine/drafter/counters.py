"""What drafters have done for which weights, as it travels from EngineCore to the service."""

from collections import OrderedDict
from typing import Final, TypedDict

from engine.speculation.counters import Snapshot as SpeculationSnapshot

MAX_PAIRS: Final = 8


class PairSnapshot(TypedDict):
    """Since the drafter served these weights first. `first_drafted` are drafts, of whose first
    tokens `first_accepted` were: a rate that does not depend on how long they were."""

    drafter: str
    weights: str
    drafted: int
    accepted: int
    first_drafted: int
    first_accepted: int


class Snapshot(TypedDict):
    """`pairs`: the latest last."""

    serving: str
    speculation: SpeculationSnapshot
    pairs: list[PairSnapshot]


class PairCounters:
    """The latest few, so that a run of many versions holds no more than a short one."""

    def __init__(self) -> None:
        self._pairs: OrderedDict[tuple[str, str], PairSnapshot] = OrderedDict()

    def verified(self, drafter: str, weights: str, num_drafted: int, num_accepted: int) -> None:
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

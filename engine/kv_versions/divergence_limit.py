"""Limit of the divergence of kept KV, from measurements by owner and age.

EngineCore and the service's process apply the same one.
"""

from collections import defaultdict
from collections.abc import Iterable


class MeasuredDivergence:
    """KL divergence from exact KV, in nats per token, by the KV's owner and its age in updates.

    It holds for the served weights only, so that each update begins without a measurement.
    """

    def __init__(self) -> None:
        self._by_owner: dict[str, list[tuple[int, float]]] = {}

    def set(self, divergences: Iterable[tuple[str, int, float]]) -> None:
        """Replace all divergences by those of these owners and ages."""
        by_owner: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
        for owner, lag, kl in sorted(divergences):
            by_owner[owner].append((lag, kl))
        self._by_owner = dict(by_owner)

    def max_lag(self, owner: str, max_kl: float) -> int:
        """Greatest measured age up to which no divergence of an owner exceeds the limit, or 0.

        KV of an age between two measured ones is not measured, but younger than the older one.
        """
        allowed = 0
        for lag, kl in self._by_owner.get(owner, ()):
            if not kl <= max_kl:  # also if it is NaN
                break
            allowed = lag
        return allowed

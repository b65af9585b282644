"""Limit of the divergence of kept KV, from measurements by its age. Runs in EngineCore."""

from collections.abc import Mapping


class MeasuredDivergence:
    """KL divergence from exact KV, in nats per token, by the age of KV in updates.

    It holds for the served weights only, so that each update begins without a measurement.
    """

    def __init__(self) -> None:
        self._by_lag: dict[int, float] = {}

    def set(self, by_lag: Mapping[int, float]) -> None:
        self._by_lag = dict(sorted(by_lag.items()))

    def max_lag(self, max_kl: float) -> int:
        """Greatest measured age up to which no measured divergence exceeds the limit, or 0.

        KV of an age between two measured ones is not measured, but younger than the older one.
        """
        allowed = 0
        for lag, kl in self._by_lag.items():
            if not kl <= max_kl:  # also if it is NaN
                break
            allowed = lag
        return allowed

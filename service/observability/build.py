"""Construction of the server's metrics and tracing."""

from collections.abc import Sequence
from dataclasses import dataclass

from coppice.wire.rollouts import GroupAnswer
from service.config.settings import TraceSettings
from service.observability.metrics import Metrics
from service.observability.tracing import Tracing


@dataclass(frozen=True, slots=True, kw_only=True)
class Observability:
    """Metrics and traces, to which the components below the routes report."""

    metrics: Metrics
    traces: Tracing

    def record_group(
        self, rollout_id: str, answer: GroupAnswer, began_at: float, sample_seconds: Sequence[float]
    ) -> None:
        """Record a finished group. `sample_seconds` is as in `RolloutMetrics.record`."""
        self.metrics.record_group(answer, sample_seconds)
        self.traces.group(rollout_id, answer, began_at, sample_seconds)


def build_observability(settings: TraceSettings) -> Observability:
    return Observability(metrics=Metrics(), traces=Tracing(settings))

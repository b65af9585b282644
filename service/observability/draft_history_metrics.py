"""Metrics of the draft history that replicas share."""

from typing import get_args

from prometheus_client import CollectorRegistry

from service.draft_history.exchange import Direction, DraftHistory, DropReason
from service.observability.metric_declaration import MetricTable, counter, gauge


class DraftHistoryMetrics(MetricTable):
    """Metrics of the exchange of finished samples with other replicas."""

    up = gauge("draft_history_up", "1 while finished samples are exchanged with other replicas")
    samples = counter(
        "draft_history_samples",
        "Finished samples written for other replicas, or added to the own draft store",
        direction=get_args(Direction),
    )
    bytes = counter(
        "draft_history_bytes",
        "Bytes of the entries written to and read from Redis",
        direction=get_args(Direction),
    )
    dropped = counter(
        "draft_history_dropped",
        "Finished samples (overflow, too_long, refused) and entries of several samples (missed, "
        "malformed) that were not exchanged",
        reason=get_args(DropReason),
    )
    failures = counter("draft_history_failures", "Exchanges with Redis that failed")

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.update(None)

    def update(self, history: DraftHistory | None) -> None:
        self.up.set(history is not None and history.is_available)

    def record_exchange(self, direction: Direction, num_samples: int, num_bytes: int) -> None:
        self.samples.labels(direction).inc(num_samples)
        self.bytes.labels(direction).inc(num_bytes)

    def record_drop(self, reason: DropReason, number: int) -> None:
        self.dropped.labels(reason).inc(number)

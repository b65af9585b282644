"""Metrics of drafters and of their training."""

from collections.abc import Mapping
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge

from engine.stats import DrafterOutcome, DrafterStatus, TrainingState


class DrafterMetrics:
    """Metrics of the drafter; all zero without one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._acceptance = Gauge(
            "coppice_drafter_acceptance_ratio",
            "Accepted of the tokens that a drafter drafted for a version of the weights",
            ["drafter", "weights"],
            registry=registry,
        )
        self._trials = Counter(
            "coppice_drafter_trials",
            "Trials of new drafters by how they ended",
            ["outcome"],
            registry=registry,
        )
        self._training = Gauge(
            "coppice_drafter_training",
            "1 for what training of the drafter is doing",
            ["training"],
            registry=registry,
        )
        self._tokens = Gauge(
            "coppice_drafter_trained_tokens", "Tokens that it was trained on", registry=registry
        )
        self._loss = Gauge(
            "coppice_drafter_loss", "Its loss a token of late, in training", registry=registry
        )
        self._dropped = Counter(
            "coppice_drafter_samples_dropped",
            "Samples that ended faster than training could be told of them",
            registry=registry,
        )
        for outcome in get_args(DrafterOutcome):
            self._trials.labels(outcome)
        self._previous = DrafterStatus(serving="")
        self.update(self._previous)

    def update(self, status: DrafterStatus | None) -> None:
        """Update the metrics from the engine's latest status.

        Acceptance is exported only for the pairs of drafter and weights version in `status`, the
        latest few; older pairs are removed.
        """
        if status is None:
            return
        previous, self._previous = self._previous, status
        self._acceptance.clear()
        for pair in status.pairs:
            ratio = pair.accepted / max(pair.drafted, 1)
            self._acceptance.labels(pair.drafter, pair.weights).set(ratio)
        self._count(previous.outcomes, status.outcomes)
        for state in get_args(TrainingState):
            self._training.labels(state).set(state == status.training)
        self._tokens.set(status.num_tokens)
        self._loss.set(status.loss)
        self._dropped.inc(status.samples_dropped - previous.samples_dropped)

    def _count(
        self, previous: Mapping[DrafterOutcome, int], now: Mapping[DrafterOutcome, int]
    ) -> None:
        for outcome, number in now.items():
            self._trials.labels(outcome).inc(number - previous.get(outcome, 0))
